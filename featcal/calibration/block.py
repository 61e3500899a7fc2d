"""One block of Algorithm 1: observe every task, add the systems up, solve, load, move on.

Legend: a system holds the normal equations of one site (linears sharing an input) or one norm, summed over tasks.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

from torch import Tensor, nn

from featcal.blocks.experts import expert_of
from featcal.blocks.linear import load_side_by_side, side_by_side
from featcal.blocks.norms import shift_of
from featcal.calibration.choice import GRID, held_out_error, least
from featcal.calibration.observe import BlockView, Observation, observe
from featcal.calibration.parts import block_parts
from featcal.calibration.ranks import Ranks
from featcal.calibration.record import BlockRecord, block_record
from featcal.calibration.sites import Site, solved_parameters
from featcal.calibration.systems import Systems
from featcal.calibration.tracks import Tracks, advance, advance_student, moved
from featcal.core.norm import NormSystem, norm_system, solve_norm
from featcal.core.ridge import Solution, anchor, both_ends, joined, ledoit_wolf, prior_system, solve_ridge, task_system
from featcal.errors import BadCapture
from featcal.settings import Calibration

FEWEST_TOKENS = 32  # of a task in one expert of a mixture: fewer say too little to count as much as another task's


def calibrate_block(
    student: nn.Module,
    base: AbstractContextManager[nn.Module],
    teachers: Callable[[], Iterable[tuple[str, nn.Module]]],
    tracks: Mapping[str, Tracks],
    view: BlockView,
    settings: Calibration,
    ranks: Ranks,
    settle: Callable[[], None] = lambda: None,
    published: Callable[[str, nn.Module], Observation] | None = None,
) -> BlockRecord:
    """Calibrate the student's block in place and move every task's tracks past it (Algorithm 1, lines 2-18).

    Blocks of base and experts are asked for when they are needed. Teachers are those of this process's tasks and must come in the
    order of names, so that sums are the same to the bit whatever the order of the caller's mapping; student and record come out
    the same on all processes. With order "sites" the block is gone through once for every part of it, and all that as often as
    there are sweeps. settle: called between solving and moving on, when the student's numbers may still be rounded.
    published: the moments of a task without tracks.
    """
    experts: dict[str, dict[str, int]] = {}
    conditioning: list[float] = []
    parts = block_parts(student, tracks, view, settings) * settings.sweeps
    led = [number for number, part in enumerate(parts) if part.modules.linears or part.attention]  # those that need the teacher
    moving = led[-1] if led else len(parts) - 1  # the part with which its track moves on
    merged = copy.deepcopy(student) if settings.sweeps > 1 else student  # else a part holds its merged weights until it is solved
    merged_way = {task: moved(student, view.stack, tracks[task].student) for task in tracks if settings.order == "stale"}
    with ExitStack() as open_:
        base_block = open_.enter_context(base) if settings.prior else None
        for number, part in enumerate(parts):
            systems = Systems()
            for task, teacher in teachers():
                if task not in tracks and published:
                    add_task(systems, published(task, teacher), teacher, settings, base_block)
                    continue
                where = number == 0, number == moving, not experts
                seen = observe(student, teacher, tracks[task], part, *where)  # Eqs. 13, 52, 56: sums
                experts.setdefault(task, {}).update(seen.experts)
                add_task(systems, seen, teacher, settings, base_block)  # Eqs. 10, 14, 58; the moments of one task at a time
            base_block = base_block or open_.enter_context(base)
            solved = solve(systems, merged, base_block, view.name, settings, ranks)  # Eqs. 11, 17, 51, 55, 59
            (choose if settings.holds_out else load)(student, solved, settings, tracks, part, ranks)
            conditioning += [solution.conditioning for solution in solved.sites.values()]
    settle()
    after = {task: advance_student(student, view.stack, tracks[task]) for task in experts}
    for task, features in merged_way.items():  # the next block is solved for what the merged model puts out
        tracks[task].student = features
    told = ranks.gathered({task: (after[task], track.tokens, experts[task]) for task, track in tracks.items()})
    return block_record(view.name, told, conditioning)


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
    for task in tracks if settings.order != "stale" else ():
        advance(student, view.stack, tracks[task].student)
    for task, teacher in teachers:
        advance(teacher, view.stack, tracks[task].teacher)


def add_task(
    systems: Systems, seen: Observation, teacher: nn.Module, settings: Calibration, base: nn.Module | None = None
) -> None:
    """Add one task's share to every system of the block, site by site; the moments are consumed. base: needed for the prior."""
    if systems.sites and systems.sites.keys() != seen.sites.keys():
        linears = sorted({name for site in systems.sites for name in site})
        raise BadCapture(linears, "they share inputs differently from task to task")
    for site in list(seen.sites):
        moments, expert = seen.sites.pop(site), expert_of(site[0], seen.experts)
        if expert and seen.experts[expert] < FEWEST_TOKENS:
            moments.weight.zero_()  # the task's share is then the empty one, and without any the anchor is kept
        W, b = side_by_side(teacher.get_submodule(name) for name in site)  # (o, d), (o,)
        affine = affine_of(teacher, site, settings)
        alpha = 1.0 if settings.interpolation == "auto" else settings.interpolation
        share = task_system(moments, W, b, alpha, settings.task_weights, affine)
        if settings.interpolation == "auto":
            share = both_ends(share, W, b, affine)
        if settings.prior and base is not None:
            W_base = side_by_side(base.get_submodule(name) for name in site)[0]
            share += prior_system(W, W_base, settings.prior, ends(settings))
        if site in systems.sites:
            systems.sites[site] += share
        else:
            systems.sites[site] = share
    for name, norm_moments in seen.norms.items():
        norm = teacher.get_submodule(name)
        norm_share = norm_system(norm_moments, norm.get_parameter("weight").detach(), shift_of(norm))
        systems.norms[name] = systems.norms[name] + norm_share if name in systems.norms else norm_share


def affine_of(block: nn.Module, site: Site, settings: Calibration) -> str:
    """How weight and bias of a site are solved: one after the other where not all of its linears have a bias."""
    with_bias = all(isinstance(block.get_submodule(name).bias, Tensor) for name in site)
    return settings.affine if with_bias else "separate"


def ends(settings: Calibration) -> int:
    """How often the outputs of a site stand side by side in its system: for α = 0 and α = 1 where α is still to be chosen."""
    return 2 if settings.interpolation == "auto" else 1


@dataclass(frozen=True)
class Solved:
    """What was found for a block, or a part of it."""

    sites: dict[Site, Solution]
    norms: dict[str, tuple[Tensor, Tensor | None]]  # scale and shift


def solve(systems: Systems, merged: nn.Module, base: nn.Module, place: str, settings: Calibration, ranks: Ranks) -> Solved:
    """Solve every system against its anchor, from blocks with the merged and the base weights. The systems are consumed."""
    systems, rho = ranks.summed(systems), settings.anchor_blend
    solutions = {}
    for site in list(systems.sites):
        W, b = side_by_side(merged.get_submodule(name) for name in site)  # (o, d), (o,)
        W_base, b_base = side_by_side(base.get_submodule(name) for name in site)
        A, a = anchor(W, W_base, rho), anchor(b, b_base, rho)  # Eqs. 11, 51
        if ends(settings) > 1:
            A, a = A.repeat(2, 1), a.repeat(2)
        system = systems.sites.pop(site)
        ridge = settings.ridge if settings.shrinkage == "fixed" else ledoit_wolf(system)
        if affine_of(merged, site, settings) == "joint":
            system = joined(system, a, ridge)
        solutions[site] = solve_ridge(system, A, a, ridge, site=f"{place}.{'+'.join(site)}")  # Eqs. 17, 55
    norms = {
        name: solved_norm(sums, merged.get_submodule(name), base.get_submodule(name), settings)
        for name, sums in systems.norms.items()
    }
    return Solved(ranks.shared(solutions), norms)


def load(student: nn.Module, solved: Solved, settings: Calibration, *_: object) -> None:
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


def choose(
    student: nn.Module, solved: Solved, settings: Calibration, tracks: Mapping[str, Tracks], view: BlockView, ranks: Ranks
) -> None:
    """Put what was found in its place, at the α and with the part of the step that hold best on samples held out.

    First α of the whole step, then the step at that α: θ = θ_merged + s (θ(α) − θ_merged) with θ(α) = θ(0) + α (θ(1) − θ(0)).
    """
    parameters = solved_parameters(student, view.modules)
    merged = {name: p.detach().clone() for name, p in parameters.items()}

    def place(alpha: float, share: float) -> None:
        load(student, Solved({site: at(s, alpha) for site, s in solved.sites.items()}, solved.norms), settings)
        for name, p in parameters.items() if share < 1 else ():
            p.copy_(merged[name].lerp(p, share))

    def at(solution: Solution, alpha: float) -> Solution:
        if ends(settings) == 1:
            return solution
        (W, W_end), (b, b_end) = solution.weight.chunk(2), solution.bias.chunk(2)
        return Solution(W.lerp(W_end, alpha), b.lerp(b_end, alpha), solution.conditioning)

    def nearest(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
        errors: dict[str, list[float]] = {task: [] for task in tracks}
        for point in points:
            place(*point)
            for task, track in tracks.items():
                errors[task].append(held_out_error(student, track, view))
        return points[least(errors, ranks)]

    alpha, share = 1.0, 1.0
    if ends(settings) > 1 and solved.sites:
        alpha, share = nearest([(a, 1.0) for a in GRID])
    if settings.no_harm:
        alpha, share = nearest([(alpha, s) for s in GRID])
    place(alpha, share)


def solved_norm(system: NormSystem, merged: nn.Module, base: nn.Module, settings: Calibration) -> tuple[Tensor, Tensor | None]:
    """Scale and shift of one norm, Eq. 59."""
    weight, shift, shift_base = merged.get_parameter("weight").detach(), shift_of(merged), shift_of(base)
    gain = anchor(weight, base.get_parameter("weight").detach(), settings.anchor_blend)
    blended = None if shift is None or shift_base is None else anchor(shift, shift_base, settings.anchor_blend)
    return solve_norm(system, gain, blended, settings.ridge)
