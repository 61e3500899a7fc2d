"""The modules of a block that calibration solves, the sites where they read, and their systems.

A site is the linears fed by the same tensor with the same token weights: q, k and v share one, and
with it one Gram matrix and one factor. In CLIP's last block the token weights split q from k and v.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from featcal.blocks.coverage import solved_modules
from featcal.blocks.experts import unpacked_experts
from featcal.calibration.tokens import same_memory
from featcal.core.norm import NormSystem
from featcal.core.ridge import RidgeSystem

Site = tuple[str, ...]  # names of the linears within their block, in the block's own order
Weigh = Callable[
    [str, Tensor], Tensor
]  # module name and its input (batch, tokens, d) -> weights of its rows


@dataclass(frozen=True)
class Modules:
    """Names of the modules of one block that are solved."""

    linears: tuple[str, ...]
    norms: tuple[str, ...]


@dataclass
class Systems:
    """The normal equations of one block, summed over the tasks added so far."""

    sites: dict[Site, RidgeSystem] = field(default_factory=dict)
    norms: dict[str, NormSystem] = field(default_factory=dict)


def calibrated_modules(
    block: nn.Module, norm: bool, modules: Sequence[str] | None = None
) -> Modules:
    """Return the linears of the block that `modules` names (default: all) and, with `norm`, its
    norms.
    """
    linears, norms = solved_modules(block, norm, modules)
    return Modules(tuple(linears), tuple(norms))


def shared_sites(
    inputs: Mapping[str, Tensor], linears: Sequence[str], weigh: Weigh
) -> dict[Site, Tensor]:
    """Return the sites of one forward with the weights of their rows, (batch, tokens)."""
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


def solved_parameters(block: nn.Module, modules: Modules) -> dict[str, nn.Parameter]:
    """Return the parameters of the solved modules by name within the block; for experts of a
    mixture the packed ones.
    """
    named = {
        name: block.get_submodule(name).named_parameters(recurse=False)
        for name in (*modules.linears, *modules.norms)
    }
    packed = {
        path: part.named_parameters(recurse=False) for path, part in unpacked_experts(block).items()
    }
    named |= {
        path: parts
        for path, parts in packed.items()
        if any(name.startswith(f"{path}.") for name in modules.linears)
    }
    return {f"{name}.{part}": p for name, parts in named.items() for part, p in parts}
