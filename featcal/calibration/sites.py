"""The modules of a block that calibration solves, and the sites where they read.

A site is the linears fed by the same tensor with the same token weights: q, k and v share one, and with it one Gram matrix
and one factor. In CLIP's last block the token weights split q from k and v by themselves.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from featcal.blocks.linear import is_linear
from featcal.blocks.norms import is_norm

Site = tuple[str, ...]  # names of the linears within their block, in the block's own order
Weigh = Callable[[str, Tensor], Tensor]  # module name and its input (batch, tokens, d) -> weights (batch, tokens)


@dataclass(frozen=True)
class Modules:
    """Names of the modules of one block that are solved."""

    linears: tuple[str, ...]
    norms: tuple[str, ...]


def calibrated_modules(block: nn.Module, norm: bool) -> Modules:
    """Every linear of the block and, unless switched off, every norm with a scale."""
    named = list(block.named_modules())
    linears = tuple(name for name, module in named if is_linear(module))
    return Modules(linears, tuple(name for name, module in named if norm and is_norm(module)))


def shared_sites(inputs: Mapping[str, Tensor], linears: Sequence[str], weigh: Weigh) -> dict[Site, Tensor]:
    """The sites of one forward with their token weights (batch, tokens)."""
    groups: list[tuple[list[str], Tensor]] = []
    for name in linears:
        x, w = inputs[name], weigh(name, inputs[name])
        for names, weights in groups:
            if same_memory(x, inputs[names[0]]) and torch.equal(w, weights):
                names.append(name)
                break
        else:
            groups.append(([name], w))
    return {tuple(names): weights for names, weights in groups}


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors that are both still held show the same values of the same memory."""
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()
