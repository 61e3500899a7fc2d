"""One block of Algorithm 1: observe every task, add the systems up, solve, load, move on.

Legend: a system holds the normal equations of one site (linears sharing an input) or one norm, summed over tasks.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

from torch import Tensor, nn

from featcal.blocks.linear import load_side_by_side, side_by_side
from featcal.blocks.norms import shift_of
from featcal.calibration.observe import BlockView, Observation, observe
from featcal.calibration.ranks import Ranks
from featcal.calibration.record import BlockRecord, block_record
from featcal.calibration.sites import Site
from featcal.calibration.systems import Systems
from featcal.calibration.tracks import Tracks, advance, advance_student, moved
from featcal.core.drift import Drift
from featcal.core.norm import NormSystem, norm_system, solve_norm
from featcal.core.ridge import Solution, anchor, solve_ridge, task_system
from featcal.errors import BadCapture
from featcal.settings import Calibration


def calibrate_block(
    student: nn.Module,
    base: AbstractContextManager[nn.Module],
    teachers: Iterable[tuple[str, nn.Module]],
    tracks: Mapping[str, Tracks],
    view: BlockView,
    settings: Calibration,
    ranks: Ranks,
    settle: Callable[[], None] = lambda: None,
) -> BlockRecord:
    """Calibrate the student's block in place and move every task's tracks past it (Algorithm 1, lines 2-18).

    Blocks of base and experts are asked for when they are needed. Teachers are those of this process's tasks and must come in the
    order of names, so that sums are the same to the bit whatever the order of the caller's mapping; student and record come out
    the same on all processes. settle: called between solving and moving on, when the student's numbers may still be rounded.
    """
    systems = Systems()
    before: dict[str, Drift] = {}
    for task, teacher in teachers:
        seen = observe(student, teacher, tracks[task], view)  # Eqs. 13, 52, 56: sums
        before[task] = seen.drift
        add_task(systems, seen, teacher, settings)  # Eqs. 10, 14, 58; the moments of one task at a time
    merged_way = {task: moved(student, view.stack, tracks[task].student) for task in before if settings.order == "stale"}
    with base as base_block:
        solutions = solve(systems, student, base_block, view.name, settings, ranks)  # Eqs. 11, 17, 51, 55, 59
    settle()
    after = {task: advance_student(student, view.stack, tracks[task]) for task in before}
    for task, features in merged_way.items():  # the next block is solved for what the merged model puts out
        tracks[task].student = features
    told = ranks.gathered({task: (before[task], after[task], track.tokens) for task, track in tracks.items()})
    return block_record(view.name, told, [s.conditioning for s in solutions.values()])


def replay_block(
    student: nn.Module,
    solved: Mapping[str, Tensor],
    teachers: Iterable[tuple[str, nn.Module]],
    tracks: Mapping[str, Tracks],
    view: BlockView,
    settings: Calibration,
) -> None:
    """Move every task's tracks after a block whose solution is known, as `calibrate_block` would: the same bits follow."""
    for task in tracks if settings.order == "stale" else ():
        advance(student, view.stack, tracks[task].student)
    for name, value in solved.items():
        student.get_parameter(name).copy_(value)
    for task in tracks if settings.order == "forward" else ():
        advance(student, view.stack, tracks[task].student)
    for task, teacher in teachers:
        advance(teacher, view.stack, tracks[task].teacher)


def add_task(systems: Systems, seen: Observation, teacher: nn.Module, settings: Calibration) -> None:
    """Add one task's share to every system of the block, site by site; the moments are consumed."""
    if systems.sites and systems.sites.keys() != seen.sites.keys():
        linears = sorted({name for site in systems.sites for name in site})
        raise BadCapture(linears, "they share inputs differently from task to task")
    for site in list(seen.sites):
        W, b = side_by_side(teacher.get_submodule(name) for name in site)  # (o, d), (o,)
        share = task_system(seen.sites.pop(site), W, b, settings.interpolation, settings.task_weights)
        if site in systems.sites:
            systems.sites[site] += share
        else:
            systems.sites[site] = share
    for name, norm_moments in seen.norms.items():
        norm = teacher.get_submodule(name)
        norm_share = norm_system(norm_moments, norm.get_parameter("weight").detach(), shift_of(norm))
        systems.norms[name] = systems.norms[name] + norm_share if name in systems.norms else norm_share


def solve(
    systems: Systems, student: nn.Module, base: nn.Module, place: str, settings: Calibration, ranks: Ranks
) -> dict[Site, Solution]:
    """Solve every system against its anchor, then load all results; the student holds the merged weights until then.

    The systems are consumed one by one.
    """
    systems = ranks.summed(systems)
    rho, ridge = settings.anchor_blend, settings.ridge
    solutions = {}
    for site in list(systems.sites):
        W, b = side_by_side(student.get_submodule(name) for name in site)  # merged (o, d), (o,)
        W_base, b_base = side_by_side(base.get_submodule(name) for name in site)
        A, a = anchor(W, W_base, rho), anchor(b, b_base, rho)  # Eqs. 11, 51
        solutions[site] = solve_ridge(systems.sites.pop(site), A, a, ridge, site=f"{place}.{'+'.join(site)}")  # Eqs. 17, 55
    solutions = ranks.shared(solutions)
    for name, norm_sums in systems.norms.items():
        solve_and_load_norm(norm_sums, student.get_submodule(name), base.get_submodule(name), settings)
    for site, solution in solutions.items():
        linears = [student.get_submodule(name) for name in site]
        load_side_by_side(linears, solution.weight, solution.bias if settings.bias else None)
    return solutions


def solve_and_load_norm(system: NormSystem, student: nn.Module, base: nn.Module, settings: Calibration) -> None:
    """Scale and shift of one norm, Eq. 59."""
    weight, shift, shift_base = student.get_parameter("weight").detach(), shift_of(student), shift_of(base)
    gain = anchor(weight, base.get_parameter("weight").detach(), settings.anchor_blend)
    blended = None if shift is None or shift_base is None else anchor(shift, shift_base, settings.anchor_blend)
    new_gain, new_shift = solve_norm(system, gain, blended, settings.ridge)
    weight.copy_(new_gain)
    if shift is not None and new_shift is not None:
        shift.copy_(new_shift)
