"""One block of Algorithm 1: observe every task, add up the systems, solve, load, move on.

A system holds the normal equations of one site (linears that share an input) or of one norm, summed
over tasks."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

from torch import Tensor, nn

from featcal.calibration.features import StudentTeacherFeatures, advance, advance_student, moved
from featcal.calibration.observe import (
    BlockView,
    Observation,
    Site,
    Systems,
    block_parts,
    last_with_teacher,
    observe,
)
from featcal.calibration.ranks import Ranks
from featcal.calibration.report import BlockRecord, block_record
from featcal.core.norm import norm_system, solve_norm
from featcal.core.ridge import (
    Solution,
    anchor,
    eliminate_bias,
    prior_system,
    solve_ridge,
    task_system,
)
from featcal.errors import BadCapture
from featcal.models.modules import load_side_by_side, shift_of, side_by_side
from featcal.models.moe import expert_of
from featcal.settings import Calibration

# of a task in one expert of a mixture: fewer say too little to count as much as another task's
FEWEST_TOKENS = 32


def calibrate_block(
    student: nn.Module,
    base: AbstractContextManager[nn.Module],
    teachers: Callable[[], Iterable[tuple[str, nn.Module]]],
    tracks: Mapping[str, StudentTeacherFeatures],
    view: BlockView,
    settings: Calibration,
    ranks: Ranks,
    round_weights: Callable[[], None] = lambda: None,
    drift: bool = True,
) -> BlockRecord:
    """Calibrate the student's block in place and move every task's tracks past it (Algorithm 1,
    lines 2-18).

    Args:
        base, teachers: the blocks of the base and of this process's experts, opened when needed.
            Experts come sorted by name, so that sums do not depend on the caller's order.
        round_weights: called after solving, to round the weights to the precision they are
            written in.
        drift: measure the drift after the block. Without it, nothing runs through the last block.

    Returns: the record, which like the student is the same on all processes.
    """
    experts: dict[str, dict[str, int]] = {}
    conditioning: list[float] = []
    parts = block_parts(student, tracks, view, settings)
    moving = last_with_teacher(parts)
    merged_way = {
        task: moved(student, view.stack, tracks[task].student)
        for task in tracks
        if settings.order == "stale"
    }
    with ExitStack() as open_:
        base_block = open_.enter_context(base) if settings.prior else None
        for number, part in enumerate(parts):
            systems = Systems()
            for task, teacher in teachers():
                seen = observe(  # Eqs. 13, 52, 56: sums
                    student, teacher, tracks[task], part, number == moving, proving=not experts
                )
                experts.setdefault(task, {}).update(seen.experts)
                # Eqs. 10, 14, 58; the moments of one task at a time
                add_task(systems, seen, teacher, settings, base_block)
            base_block = base_block or open_.enter_context(base)
            # Eqs. 11, 17, 51, 55, 59; a part holds the merged weights until it is solved
            solved = solve(systems, student, base_block, view.name, settings, ranks)
            load(student, solved, settings)
            conditioning += [solution.conditioning for solution in solved.sites.values()]
    round_weights()
    after = {task: advance_student(student, view.stack, tracks[task]) for task in experts if drift}
    if not drift and (view.stack.feeds or not view.last):
        for task in experts:
            advance(student, view.stack, tracks[task].student)
    for task, features in merged_way.items():  # the next block sees the merged model's features
        tracks[task].student = features
    records = ranks.gathered(
        {task: (after.get(task), track.tokens, experts[task]) for task, track in tracks.items()}
    )
    return block_record(view.name, records, conditioning)


def replay_block(
    student: nn.Module,
    solved: Mapping[str, Tensor],
    teachers: Iterable[tuple[str, nn.Module]],
    tracks: Mapping[str, StudentTeacherFeatures],
    view: BlockView,
    settings: Calibration,
) -> None:
    """Load a block's known solution and move every task's tracks past it, bit-identical to
    `calibrate_block`.
    """
    if settings.order == "stale":
        for task in tracks:
            advance(student, view.stack, tracks[task].student)
    for name, value in solved.items():
        student.get_parameter(name).copy_(value)
    if settings.order != "stale":
        for task in tracks:
            advance(student, view.stack, tracks[task].student)
    for task, teacher in teachers:
        advance(teacher, view.stack, tracks[task].teacher)


def add_task(
    systems: Systems,
    seen: Observation,
    teacher: nn.Module,
    settings: Calibration,
    base: nn.Module | None = None,
) -> None:
    """Add one task's share to every system of the block, site by site; the moments are consumed.

    base: the base's block, needed for the prior.
    """
    if systems.sites and systems.sites.keys() != seen.sites.keys():
        linears = sorted({name for site in systems.sites for name in site})
        raise BadCapture(linears, "they share inputs differently from task to task")
    for site in list(seen.sites):
        moments, expert = seen.sites.pop(site), expert_of(site[0], seen.experts)
        W, b = side_by_side(teacher.get_submodule(name) for name in site)  # (o, d), (o,)
        if expert and seen.experts[expert] < FEWEST_TOKENS:
            # the task's share is then the empty one, and without any the anchor is kept
            moments.weight.zero_()
        affine = affine_of(teacher, site, settings)
        share = task_system(moments, W, b, settings.interpolation, settings.task_weights, affine)
        if settings.prior and base is not None:
            W_base = side_by_side(base.get_submodule(name) for name in site)[0]
            share += prior_system(W, W_base, settings.prior)
        if site in systems.sites:
            systems.sites[site] += share
        else:
            systems.sites[site] = share
    for name, norm_moments in seen.norms.items():
        norm = teacher.get_submodule(name)
        norm_share = norm_system(
            norm_moments, norm.get_parameter("weight").detach(), shift_of(norm)
        )
        systems.norms[name] = (
            systems.norms[name] + norm_share if name in systems.norms else norm_share
        )


@dataclass(frozen=True)
class Solved:
    """The solutions of a block, or of a part of it."""

    sites: dict[Site, Solution]
    norms: dict[str, tuple[Tensor, Tensor | None]]  # scale and shift


def solve(
    systems: Systems,
    merged: nn.Module,
    base: nn.Module,
    block_name: str,
    settings: Calibration,
    ranks: Ranks,
) -> Solved:
    """Solve every system against its anchor, from blocks with the merged and the base weights. The
    systems are consumed.
    """
    systems, rho = ranks.summed(systems), settings.anchor_blend
    solutions = {}
    for site in list(systems.sites):
        A, a = anchors(merged, base, site, rho)
        system = systems.sites.pop(site)
        if affine_of(merged, site, settings) == "joint":
            system = eliminate_bias(system, a, settings.ridge)
        solutions[site] = solve_ridge(  # Eqs. 17, 55
            system, A, a, settings.ridge, site=f"{block_name}.{'+'.join(site)}"
        )
    norms = {}
    for name, sums in systems.norms.items():
        norm, norm_base = merged.get_submodule(name), base.get_submodule(name)
        gain, gain_base = (n.get_parameter("weight").detach() for n in (norm, norm_base))
        shift, shift_base = shift_of(norm), shift_of(norm_base)
        blended = None if shift is None or shift_base is None else anchor(shift, shift_base, rho)
        norms[name] = solve_norm(  # Eq. 59
            sums, anchor(gain, gain_base, rho), blended, settings.ridge
        )
    return Solved(ranks.shared(solutions), norms)


def anchors(merged: nn.Module, base: nn.Module, site: Site, rho: float) -> tuple[Tensor, Tensor]:
    """Return the anchors (o, d) and (o,) of a site's weight and bias (Eqs. 11 and 51)."""
    (W, b), (W_base, b_base) = (
        side_by_side(block.get_submodule(name) for name in site) for block in (merged, base)
    )
    return anchor(W, W_base, rho), anchor(b, b_base, rho)


def load(student: nn.Module, solved: Solved, settings: Calibration) -> None:
    """Write the solutions into the student's block."""
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
    """Return how weight and bias of a site are solved: "separate" unless all its linears have a
    bias.
    """
    with_bias = all(isinstance(block.get_submodule(name).bias, Tensor) for name in site)
    return settings.affine if with_bias else "separate"
