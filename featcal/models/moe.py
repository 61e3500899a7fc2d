"""Show the packed experts of a mixture as linears that calibration can solve.

transformers 5 stores the experts of a layer as gate_up_proj (E, 2i, d) and down_proj (E, d, i).
The linears here are views: writing to them writes to these tensors, and nothing is copied.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from featcal.errors import BadPlan

PARTS = ("gate_up_proj", "down_proj")
ROUNDING = 1e-5  # relative difference of products that differ only in the order of their sums


class View(nn.Linear):
    """A linear whose weight (o, d) is part of another module's parameter."""

    def __init__(self, weight: Tensor):
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, None  # type: ignore[assignment]


class ExpertMLP(nn.Module):
    """One expert: down(act(gate x) · up x)."""

    def __init__(self, gate_up: Tensor, down: Tensor, act: nn.Module):
        super().__init__()
        gate, up = gate_up.chunk(2)
        self.gate_proj, self.up_proj, self.down_proj = View(gate), View(up), View(down)
        self.act_fn = act

    def forward(self, x: Tensor, hooks: bool = True) -> Tensor:
        """Return the output (tokens, d) for x (tokens, d); without hooks no hook of a linear runs."""
        gate, up, down = (
            linear if hooks else linear.forward
            for linear in (self.gate_proj, self.up_proj, self.down_proj)
        )
        return down(self.act_fn(gate(x)) * up(x))


class Unpacked(nn.Module):
    """Packed experts as modules "0", "1", ...; the parameters stay the packed ones.

    rows: per expert the tokens last routed to it, as row numbers of (batch · tokens, d).
    lead: rows of another model's experts, on which hooks see the experts run.
    """

    def __init__(self, packed: nn.Module):
        super().__init__()
        for name in PARTS:
            self.register_parameter(name, packed.get_parameter(name))
        weights = zip(self.gate_up_proj.detach(), self.down_proj.detach(), strict=True)  # type: ignore[operator]
        for number, (gate_up, down) in enumerate(weights):
            self.add_module(str(number), ExpertMLP(gate_up, down, packed.act_fn))  # type: ignore[arg-type]
        self.rows: list[Tensor] = []
        self.lead: list[Tensor] | None = None

    @property
    def work(self) -> int:
        """Return the floating-point operations of the last forward."""
        tokens = sum(len(rows) for rows in self.rows)
        values = sum(p.numel() for p in self.parameters(recurse=False))
        return 2 * tokens * (values // max(len(self.rows), 1))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the output of the packed experts; top_k_index, top_k_weights: (tokens, k)."""
        experts: list[Any] = list(self.children())
        if top_k_index.is_meta:  # nothing is routed: give every expert an even share
            rows = top_k_index.new_empty(top_k_index.numel(), dtype=torch.long)
            routes = [(share, share) for share in rows.tensor_split(len(experts))]
        else:
            routes = [torch.where(top_k_index == i) for i in range(len(experts))]
        self.rows = [rows for rows, _ in routes]
        out = torch.zeros_like(hidden_states)
        for expert, (rows, choice) in zip(experts, routes, strict=True):
            share = expert(hidden_states[rows], hooks=self.lead is None)
            share = share * top_k_weights[rows, choice, None]
            out.index_add_(0, rows, share.to(out.dtype))
        for expert, rows in zip(experts, self.lead or (), strict=False):
            expert(hidden_states[rows])
        return out


def packed_experts(block: nn.Module) -> dict[str, nn.Module]:
    """Return by path the modules of a block that hold experts in the two packed tensors."""
    packed = {}
    for path, part in block.named_modules():
        shapes = {name: p.shape for name, p in part.named_parameters(recurse=False)}
        acts = isinstance(getattr(part, "act_fn", None), nn.Module)
        if acts and shapes.keys() == set(PARTS) and not isinstance(part, Unpacked):
            gate_up, down = (shapes[name] for name in PARTS)  # (E, 2i, d), (E, d, i)
            if len(gate_up) == len(down) == 3 and gate_up == (down[0], 2 * down[2], down[1]):
                packed[path] = part
    return packed


def unpacked_experts(block: nn.Module) -> dict[str, Unpacked]:
    """Return the unpacked experts of a block by path."""
    return {path: part for path, part in block.named_modules() if isinstance(part, Unpacked)}


@contextmanager
def unpacked(block: nn.Module) -> Iterator[None]:
    """Replace the packed experts of a block by linears inside the `with`."""
    packed = packed_experts(block)
    for path, part in packed.items():
        block.set_submodule(path, Unpacked(part))
    try:
        yield
    finally:
        for path, part in packed.items():
            block.set_submodule(path, part)


@contextmanager
def following(block: nn.Module, leader: nn.Module) -> Iterator[None]:
    """Let hooks see the block's experts run on the tokens last routed to the leader's experts."""
    own, leading = unpacked_experts(block), unpacked_experts(leader)
    for path, part in own.items():
        part.lead = leading[path].rows
    try:
        yield
    finally:
        for part in own.values():
            part.lead = None


def routed(block: nn.Module) -> dict[str, Tensor]:
    """Return the tokens last routed to each expert, by the expert's path in the block."""
    return {
        f"{path}.{number}": rows
        for path, part in unpacked_experts(block).items()
        for number, rows in enumerate(part.rows)
    }


def expert_of(name: str, known: Mapping[str, object]) -> str | None:
    """Return the expert that a linear belongs to, or None if every token reaches it."""
    expert = name.rpartition(".")[0]
    return expert if expert in known else None


@contextmanager
def same_unpacked(model: nn.Module) -> Iterator[None]:
    """Raise BadPlan if packed experts that run inside the `with` differ from their linears."""

    def compare(path: str, part: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        bound = max(ROUNDING, 4 * torch.finfo(out.dtype).eps)
        difference = float((Unpacked(part)(*args) - out).abs().max())
        if not difference <= bound * float(out.abs().max()):
            problem = f"the experts of {path} differ from plain linears by {difference:.3g}"
            raise BadPlan(type(model).__name__, problem)

    with ExitStack() as hooks:
        for path, part in packed_experts(model).items():
            hooks.enter_context(part.register_forward_hook(partial(compare, path)))
        yield
