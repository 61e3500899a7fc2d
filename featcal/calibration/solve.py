"""The systems of a block, or of a part of it, solved against their anchors; and what was found put
in its place.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from featcal.blocks.linear import load_side_by_side, side_by_side
from featcal.blocks.norms import shift_of
from featcal.calibration.ranks import Ranks
from featcal.calibration.sites import Site, ends
from featcal.calibration.systems import Systems
from featcal.core.kernel import KernelSystem, solve_kernel
from featcal.core.norm import NormSystem, solve_norm
from featcal.core.ridge import Solution, anchor, joined, ledoit_wolf, solve_ridge
from featcal.settings import Calibration


@dataclass(frozen=True)
class Solved:
    """What was found for a block, or a part of it."""

    sites: dict[Site, Solution]
    norms: dict[str, tuple[Tensor, Tensor | None]]  # scale and shift


def anchors(
    merged: nn.Module, base: nn.Module, site: Site, settings: Calibration
) -> tuple[Tensor, Tensor]:
    """What the ridge pulls a site's weight and bias to (Eqs. 11, 51), as often as its outputs stand
    side by side.
    """
    (W, b), (W_base, b_base) = (
        side_by_side(block.get_submodule(name) for name in site) for block in (merged, base)
    )
    A, a = (
        anchor(W, W_base, settings.anchor_blend),
        anchor(b, b_base, settings.anchor_blend),
    )  # (o, d), (o,)
    return (A.repeat(2, 1), a.repeat(2)) if ends(settings) > 1 else (A, a)


def solve(
    systems: Systems,
    merged: nn.Module,
    base: nn.Module,
    place: str,
    settings: Calibration,
    ranks: Ranks,
) -> Solved:
    """Solve every system against its anchor, from blocks with the merged and the base weights. The
    systems are consumed.
    """
    systems = ranks.summed(systems)
    solutions = {}
    for site in list(systems.sites):
        A, a = anchors(merged, base, site, settings)
        system, affine, name = (
            systems.sites.pop(site),
            affine_of(merged, site, settings),
            f"{place}.{'+'.join(site)}",
        )
        if isinstance(system, KernelSystem):
            solutions[site] = solve_kernel(
                system, A, a, settings.ridge, settings.task_weights, affine, site=name
            )
            continue
        ridge = settings.ridge if settings.shrinkage == "fixed" else ledoit_wolf(system)
        if affine == "joint":
            system = joined(system, a, ridge)
        solutions[site] = solve_ridge(system, A, a, ridge, site=name)  # Eqs. 17, 55
    norms = {
        name: solved_norm(sums, merged.get_submodule(name), base.get_submodule(name), settings)
        for name, sums in systems.norms.items()
    }
    return Solved(ranks.shared(solutions), norms)


def solved_norm(
    system: NormSystem, merged: nn.Module, base: nn.Module, settings: Calibration
) -> tuple[Tensor, Tensor | None]:
    """Scale and shift of one norm, Eq. 59."""
    weight, shift, shift_base = (
        merged.get_parameter("weight").detach(),
        shift_of(merged),
        shift_of(base),
    )
    gain = anchor(weight, base.get_parameter("weight").detach(), settings.anchor_blend)
    blended = (
        None
        if shift is None or shift_base is None
        else anchor(shift, shift_base, settings.anchor_blend)
    )
    return solve_norm(system, gain, blended, settings.ridge)


def load(student: nn.Module, solved: Solved, settings: Calibration) -> None:
    """Put everything that was found in its place."""
    for name, (gain, shift) in solved.norms.items():
        norm = student.get_submodule(name)
        norm.get_parameter("weight").detach().copy_(gain)
        own = shift_of(norm)
        if own is not None and shift is not None:
            own.copy_(shift)
    for site, solution in solved.sites.items():
        linears = [student.get_submodule(name) for name in site]
        load_side_by_side(linears, solution.weight, solution.bias if settings.bias else None)


def affine_of(block: nn.Module, site: Site, settings: Calibration) -> str:
    """How weight and bias of a site are solved: one after the other where not all of its linears
    have a bias.
    """
    with_bias = all(isinstance(block.get_submodule(name).bias, Tensor) for name in site)
    return settings.affine if with_bias else "separate"
