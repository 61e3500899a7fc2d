"""An encoder as the paper's Eq. 1 sees it, with blocks as layers, and the records of checks."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from featcal.core.precision import exact_products
from featcal.models.batch import Batch, token_mean
from featcal.models.blocks import (
    Arguments,
    first_inputs,
    model_call,
    module_inputs,
    module_outputs,
    step,
)
from featcal.models.plan import Stack, blocks_of, plan_for
from reproduction.engine.features import block_outputs

ROUNDING = 1e-16  # smaller errors count as rounding
SHOWN = 4  # points of one statement, task and model that are kept for plots


@dataclass
class Checks:
    """Lines (statement, quantity, block, nodes, value, count) and points for plots.

    `digits`: decimal digits that both sides of an equation share.   `room`: percent by which the
    larger side of an inequality exceeds the smaller. Both are the worst of `count` cases.
    """

    lines: list[dict[str, Any]] = field(default_factory=list)
    points: list[dict[str, Any]] = field(default_factory=list)

    def add(self, statement: str, quantity: str, value: float, count: int, **columns: Any) -> None:
        """Add a line. columns: its block, or the number of nodes."""
        line = {"statement": statement, "quantity": quantity, "block": "", "nodes": ""}
        self.lines.append({**line, **columns, "value": float(value), "count": count})

    def exact(self, statement: str, quantity: str, error: Tensor, **columns: Any) -> None:
        """Add an equation's relative errors, one per case."""
        if error.numel():
            digits = -math.log10(max(float(error.max()), ROUNDING))  # at most 16
            self.add(statement, quantity, digits, error.numel(), **columns)

    def bounded(self, statement: str, larger: Tensor, smaller: Tensor) -> None:
        """Add an inequality's least room, and the median of smaller / larger in percent."""
        cases = smaller > 0
        if cases.any():
            ratio = larger[cases] / smaller[cases]
            self.add(statement, "room", 100 * (float(ratio.min()) - 1), len(ratio))
            self.add(statement, "tightness", 100 * float((1 / ratio).median()), len(ratio))

    def bounded_and_shown(self, statement: str, larger: Tensor, smaller: Tensor) -> None:
        self.bounded(statement, larger, smaller)
        self.show(statement, smaller, larger)

    def show(
        self,
        statement: str,
        actual: Tensor,
        bound: Tensor,
        block: str = "",
        kept: Tensor | None = None,
        most: int = SHOWN,
    ) -> None:
        """Add the first `most` points of a plot."""
        pairs = zip(actual[:most].tolist(), bound[:most].tolist(), strict=True)
        for index, (a, b) in enumerate(pairs):
            point = {"statement": statement, "block": block, "index": index}
            point |= {"actual": float(a), "bound": float(b)}
            self.points.append(point | {"kept": "" if kept is None else int(kept[index])})


def relative(difference: Tensor, size: Tensor) -> Tensor:
    """Return ‖difference‖ / ‖size‖ of every case, (n,); 0 where both vanish."""
    return norms(difference) / norms(size).clamp_min(1e-300)


def norms(x: Tensor) -> Tensor:
    """Return the norm of every case over all tokens and features: (n, …) to (n,)."""
    return x.flatten(1).norm(dim=1)


def dots(x: Tensor, y: Tensor) -> Tensor:
    """Return the inner product of every case: (n, …), (n, …) to (n,)."""
    return (x * y).flatten(1).sum(1)


# linears whose outputs a CLIP block adds to its input
BRANCH_ENDS = ("self_attn.out_proj", "mlp.fc2")


@dataclass(frozen=True)
class Tower:
    """One model on n images or texts.

    features: h_0 … h_L, each (n, tokens, d), from the model's own forward.   norm: after the last
    block, on the pooled feature.   mask: (n, tokens), 1 where a token counts; None for images,
    whose class token is pooled.
    """

    blocks: nn.ModuleList
    stack: Stack
    arguments: Arguments
    features: list[Tensor]
    norm: nn.Module
    mask: Tensor | None = None

    @property
    def pooled(self) -> Tensor:
        """Return the last block's class token, or the mean over tokens for texts, (n, d)."""
        last = self.features[-1]
        return last[:, 0] if self.mask is None else token_mean(last, self.mask)

    @property
    def adds(self) -> bool:
        """Return whether blocks add branches to their input (Eq. 25); BERT has a norm after it."""
        return all(name in dict(self.blocks[0].named_modules()) for name in BRANCH_ENDS)

    @property
    def maps(self) -> list[Callable[[Tensor], Tensor]]:
        """Return f_1 … f_L, one per block, each run by itself."""
        return [partial(self._map, block) for block in self.blocks]

    def _map(self, block: nn.Module, hidden: Tensor) -> Tensor:
        return counted(step(block, self.stack, hidden, self.arguments)[0], self.mask)

    @torch.no_grad()
    def branches(self, index: int, hidden: Tensor) -> Tensor:
        """Return g(h) of Eq. 25 for one block, the sum of its two residual branches."""
        with module_outputs(self.blocks[index], BRANCH_ENDS) as outputs:
            self._map(self.blocks[index], hidden)
        return sum((outputs[name] for name in BRANCH_ENDS), torch.zeros_like(hidden))

    @torch.no_grad()
    def inputs(self, index: int, hidden: Tensor, names: list[str]) -> dict[str, Tensor]:
        """Return the inputs of named modules of a block for its input `hidden`, as rows (tokens, d)."""
        with module_inputs(self.blocks[index], names) as inputs:
            self._map(self.blocks[index], hidden)
        counts = None if self.mask is None else self.mask.bool()
        return {n: x.flatten(0, -2) if counts is None else x[counts] for n, x in inputs.items()}


@torch.no_grad()
def tower(model: nn.Module, batch: Batch) -> Tower:
    """Run an encoder on one batch of images or texts, in the precision of its weights."""
    stack = plan_for(model).stacks[0]
    blocks, weight = blocks_of(model, stack), next(model.parameters())
    batch = {name: x.to(weight.device) for name, x in batch.items()}
    batch = {name: x.to(weight) if x.is_floating_point() else x for name, x in batch.items()}
    mask = batch.get("attention_mask")
    with exact_products():
        with block_outputs(blocks) as outputs:
            model(**model_call(model, batch))
        _, arguments = first_inputs(model, stack, batch)
    norm = model.get_submodule("post_layernorm") if mask is None else nn.Identity()
    return Tower(blocks, stack, arguments, [counted(h, mask) for h in outputs.values()], norm, mask)


def counted(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Return hidden (n, tokens, d) with zeros at padding."""
    return hidden if mask is None else hidden * mask.to(hidden)[..., None]
