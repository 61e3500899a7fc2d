"""One block of Algorithm 1: observe every task, add the systems up, solve, load, move on.

Legend: a system holds the normal equations of one site (linears sharing an input) or one norm,
summed over tasks.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack

from torch import Tensor, nn

from featcal.blocks.experts import expert_of
from featcal.blocks.linear import side_by_side
from featcal.blocks.norms import shift_of
from featcal.calibration.choice import choose
from featcal.calibration.observe import BlockView, Observation, observe
from featcal.calibration.parts import block_parts, last_with_teacher
from featcal.calibration.ranks import Ranks
from featcal.calibration.record import BlockRecord, block_record
from featcal.calibration.sites import Site, ends
from featcal.calibration.solve import affine_of, anchors, load, solve
from featcal.calibration.systems import Systems
from featcal.calibration.tracks import Tracks, advance, advance_student, moved
from featcal.core.kernel import KernelSystem, task_rows
from featcal.core.moments import Rows
from featcal.core.norm import norm_system
from featcal.core.ridge import RidgeSystem, both_ends, prior_system, task_system
from featcal.errors import BadCapture
from featcal.settings import Calibration

# of a task in one expert of a mixture: fewer say too little to count as much as another task's
FEWEST_TOKENS = 32


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
    drift: bool = True,
) -> BlockRecord:
    """Calibrate the student's block in place and move every task's tracks past it (Algorithm 1,
    lines 2-18).

    Blocks of base and experts are asked for when they are needed. Teachers are those of this
    process's tasks and must come in the order of names, so that sums are the same to the bit
    whatever the order of the caller's mapping; student and record come out the same on all
    processes. With order "sites" the block is gone through once for every part of it, and all that
    as often as there are sweeps. settle: called between solving and moving on, when the student's
    numbers may still be rounded.
    published: the moments of a task without tracks. drift: tell it; without it tracks stay before a
    block that nothing follows.
    """
    experts: dict[str, dict[str, int]] = {}
    conditioning: list[float] = []
    parts = block_parts(student, tracks, view, settings) * settings.sweeps
    moving = last_with_teacher(parts)
    merged = (
        copy.deepcopy(student) if settings.sweeps > 1 else student
    )  # else a part holds its merged weights until it is solved
    merged_way = {
        task: moved(student, view.stack, tracks[task].student)
        for task in tracks
        if settings.order == "stale"
    }
    with ExitStack() as open_:
        base_block = (
            open_.enter_context(base) if settings.prior or view.tokens is not None else None
        )
        for number, part in enumerate(parts):
            systems = Systems()
            for task, teacher in teachers():
                if task not in tracks and published:
                    add_task(systems, published(task, teacher), teacher, settings, base_block)
                    continue
                where = number == 0, number == moving, not experts
                seen = observe(
                    student, teacher, tracks[task], part, *where
                )  # Eqs. 13, 52, 56: sums
                experts.setdefault(task, {}).update(seen.experts)
                # Eqs. 10, 14, 58; the moments of one task at a time
                add_task(systems, seen, teacher, settings, base_block, merged)
            base_block = base_block or open_.enter_context(base)
            solved = solve(
                systems, merged, base_block, view.name, settings, ranks
            )  # Eqs. 11, 17, 51, 55, 59
            if settings.holds_out:
                choose(student, solved, settings, tracks, part, ranks)
            else:
                load(student, solved, settings)
            conditioning += [solution.conditioning for solution in solved.sites.values()]
    settle()
    after = {task: advance_student(student, view.stack, tracks[task]) for task in experts if drift}
    for task in () if drift or (view.last and not view.stack.feeds) else experts:
        advance(student, view.stack, tracks[task].student)
    for (
        task,
        features,
    ) in merged_way.items():  # the next block is solved for what the merged model puts out
        tracks[task].student = features
    told = ranks.gathered(
        {task: (after.get(task), track.tokens, experts[task]) for task, track in tracks.items()}
    )
    return block_record(view.name, told, conditioning)


def replay_block(
    student: nn.Module,
    solved: Mapping[str, Tensor],
    teachers: Iterable[tuple[str, nn.Module]],
    tracks: Mapping[str, Tracks],
    view: BlockView,
    settings: Calibration,
) -> None:
    """Move every task's tracks after a block whose solution is known, as `calibrate_block` would:
    the same bits follow.
    """
    for task in tracks if settings.order == "stale" else ():
        advance(student, view.stack, tracks[task].student)
    for name, value in solved.items():
        student.get_parameter(name).copy_(value)
    for task in tracks if settings.order != "stale" else ():
        advance(student, view.stack, tracks[task].student)
    for task, teacher in teachers:
        advance(teacher, view.stack, tracks[task].teacher)


def add_task(
    systems: Systems,
    seen: Observation,
    teacher: nn.Module,
    settings: Calibration,
    base: nn.Module | None = None,
    merged: nn.Module | None = None,
) -> None:
    """Add one task's share to every system of the block, site by site; the moments are consumed.

    base: needed for the prior, and with the merged block where tokens are kept.
    """
    if systems.sites and systems.sites.keys() != seen.sites.keys():
        linears = sorted({name for site in systems.sites for name in site})
        raise BadCapture(linears, "they share inputs differently from task to task")
    for site in list(seen.sites):
        moments, expert = seen.sites.pop(site), expert_of(site[0], seen.experts)
        W, b = side_by_side(teacher.get_submodule(name) for name in site)  # (o, d), (o,)
        if isinstance(moments, Rows):
            assert base is not None and merged is not None and settings.interpolation != "auto"
            add_share(
                systems,
                site,
                task_rows(
                    moments, W, b, *anchors(merged, base, site, settings), settings.interpolation
                ),
            )
            continue
        if expert and seen.experts[expert] < FEWEST_TOKENS:
            # the task's share is then the empty one, and without any the anchor is kept
            moments.weight.zero_()
        affine = affine_of(teacher, site, settings)
        alpha = 1.0 if settings.interpolation == "auto" else settings.interpolation
        share = task_system(moments, W, b, alpha, settings.task_weights, affine)
        if settings.interpolation == "auto":
            share = both_ends(share, W, b, affine)
        if settings.prior and base is not None:
            W_base = side_by_side(base.get_submodule(name) for name in site)[0]
            share += prior_system(W, W_base, settings.prior, ends(settings))
        add_share(systems, site, share)
    for name, norm_moments in seen.norms.items():
        norm = teacher.get_submodule(name)
        norm_share = norm_system(
            norm_moments, norm.get_parameter("weight").detach(), shift_of(norm)
        )
        systems.norms[name] = (
            systems.norms[name] + norm_share if name in systems.norms else norm_share
        )


def add_share(systems: Systems, site: Site, share: RidgeSystem | KernelSystem) -> None:
    """Add one task's share to the system of its site, which the first one becomes."""
    if site in systems.sites:
        systems.sites[site] += share  # type: ignore[arg-type]  # a site has the same form in every task
    else:
        systems.sites[site] = share
