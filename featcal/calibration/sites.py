"""The modules of a block that calibration solves, and the sites where they read.

A site is the linears fed by the same tensor with the same token weights: q, k and v share one, and
with it one Gram matrix and one factor. In CLIP's last block the token weights split q from k and v
by themselves.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from featcal.blocks.coverage import solved_modules
from featcal.blocks.experts import unpacked_experts
from featcal.calibration.tokens import same_memory
from featcal.settings import Calibration

Site = tuple[str, ...]  # names of the linears within their block, in the block's own order
Weigh = Callable[
    [str, Tensor], Tensor
]  # module name and its input (batch, tokens, d) -> weights of its rows


@dataclass(frozen=True)
class Modules:
    """Names of the modules of one block that are solved."""

    linears: tuple[str, ...]
    norms: tuple[str, ...]


def calibrated_modules(
    block: nn.Module, norm: bool, modules: Sequence[str] | None = None
) -> Modules:
    """Every linear of the block, or those that `modules` means, and, unless switched off, every
    norm with a scale.
    """
    linears, norms = solved_modules(block, norm, modules)
    return Modules(tuple(linears), tuple(norms))


def shared_sites(
    inputs: Mapping[str, Tensor], linears: Sequence[str], weigh: Weigh
) -> dict[Site, Tensor]:
    """The sites of one forward with the weights of their rows, (batch, tokens)."""
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


def ends(settings: Calibration) -> int:
    """How often the outputs of a site stand side by side in its system: for α = 0 and α = 1 where α
    is still to be chosen.
    """
    return 2 if settings.interpolation == "auto" else 1


def has_kernel_form(settings: Calibration, processes: int) -> bool:
    """Whether sites with more features than tokens are solved by their tokens (`core.kernel`),
    which one process has all of.

    A prior makes the left side more than tokens do, λ is estimated from d × d sums, and both ends
    of α need them twice.
    """
    return (
        processes == 1
        and not settings.prior
        and settings.shrinkage == "fixed"
        and ends(settings) == 1
    )


def solved_parameters(block: nn.Module, modules: Modules) -> dict[str, nn.Parameter]:
    """Parameters of the modules that are solved, by name within the block; of experts the packed
    ones.
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
