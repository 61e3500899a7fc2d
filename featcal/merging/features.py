"""What RegMean, RegMean++ and LOT see of one expert's block: sums over the tokens that reach its
linears and norms.

A site is the linears that read the same tensor (q, k, v). Padding counts nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from featcal.blocks.capture import Features, module_inputs
from featcal.blocks.coverage import solved_modules
from featcal.blocks.norms import normalised
from featcal.blocks.plan import Stack
from featcal.blocks.replay import step
from featcal.core.moments import add_gram, mirror
from featcal.core.precision import SUM_DTYPE

Site = tuple[str, ...]  # names of linears within their block


@dataclass
class Track:
    """One task's batches just before the current block."""

    features: list[Features] = field(default_factory=list)
    masks: list[Tensor | None] = field(default_factory=list)  # (batch, tokens), 0 at padding
    fed_masks: list[Tensor | None] = field(
        default_factory=list
    )  # of the tokens that another stack feeds
    fed: str = ""  # by which keyword blocks receive them


@dataclass
class Seen:
    """Sums of one task in one block."""

    grams: dict[Site, Tensor] = field(default_factory=dict)  # (d, d)  Σ x xᵀ
    tokens: dict[Site, int] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(
        default_factory=dict
    )  # (d,) of each norm  Σ x̂², before its scale


def watched(block: nn.Module, stack: Stack, track: Track) -> tuple[Seen, list[Features]]:
    """Return the sums of one block over a task's batches, and the block's outputs.

    Products are made in the data's precision, sums in float64. Raises: BadCapture where an input cannot be trusted.
    """
    seen, out = Seen(), []
    linears, norms = solved_modules(block)
    for (hidden, arguments), mask, fed_mask in zip(
        track.features, track.masks, track.fed_masks, strict=True
    ):
        with module_inputs(block, [*linears, *norms]) as inputs:
            out.append(step(block, stack, hidden, arguments))
        fed = arguments[0].get(track.fed)
        for site in sites(inputs, linears):
            x = inputs[site[0]]
            rows = counted(
                x, fed_mask if isinstance(fed, Tensor) and memory(x) == memory(fed) else mask
            )  # (n, d)
            if site not in seen.grams:
                seen.grams[site] = rows.new_zeros(rows.shape[1], rows.shape[1], dtype=SUM_DTYPE)
            add_gram(seen.grams[site], rows)
            seen.tokens[site] = seen.tokens.get(site, 0) + len(rows)
        for name in norms:
            z = counted(normalised(block.get_submodule(name), inputs[name]), mask)
            seen.squares[name] = seen.squares.get(name, 0) + z.square().sum(0, dtype=SUM_DTYPE)
    for G in seen.grams.values():
        mirror(G)
    return seen, out


def sites(inputs: dict[str, Tensor], linears: Sequence[str]) -> list[Site]:
    """Linears by the tensor they read."""
    groups: dict[object, list[str]] = {}
    for name in linears:
        groups.setdefault(memory(inputs[name]), []).append(name)
    return [tuple(names) for names in groups.values()]


def memory(x: Tensor) -> tuple[object, ...]:
    """What two tensors that are both still held share when they show the same values of the same
    memory.
    """
    return x.data_ptr(), x.shape, x.stride()


def counted(x: Tensor, mask: Tensor | None) -> Tensor:
    """Rows (n, d) of an input (batch, tokens, d) or (batch · tokens, d) without padding; half
    precision becomes float32.
    """
    if mask is not None and x.shape[: mask.dim()] == mask.shape:
        x = x[mask.bool()]
    elif mask is not None and x.shape[:-1] == (mask.numel(),):
        x = x[mask.flatten().bool()]
    x = x.reshape(-1, x.shape[-1])
    return x if x.dtype == torch.float64 else x.float()
