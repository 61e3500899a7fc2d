"""Calibrate every block of every stack in forward order; resume from solved blocks."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from featcal.calibration.block import calibrate_block, replay_block
from featcal.calibration.features import (
    EncoderOutputs,
    Spool,
    SpooledList,
    Stream,
    StudentTeacherFeatures,
    advance,
    hand_on,
    on_device,
    start_tracks,
)
from featcal.calibration.models import Models
from featcal.calibration.observe import (
    BlockView,
    block_parts,
    calibrated_modules,
    last_with_teacher,
    observe,
    solved_parameters,
)
from featcal.calibration.ranks import Ranks
from featcal.calibration.report import BlockRecord, line
from featcal.calibration.resume import RunFolder, block_name, fingerprint
from featcal.core.moments import TokenRule
from featcal.models.batch import Batches, check_batch, first_samples, naming
from featcal.models.plan import Stack, blocks_of
from featcal.models.replay import check_replay
from featcal.models.streamed import in_turn
from featcal.settings import Calibration, require


@dataclass(frozen=True)
class Run:
    """Everything that stays the same from stack to stack."""

    models: Models  # with the experts of this process
    tasks: int  # of all processes
    settings: Calibration
    token_weights: TokenRule | None
    spool: Spool
    folder: RunFolder | None
    resume: bool
    ranks: Ranks
    progress: Callable[[str], None] | None
    block_drift: bool = True  # measure the drift after every block
    known: set[str] = field(default_factory=set)  # blocks whose solutions came from an earlier run
    solves: bool = True  # False: only observe the blocks, as a check


def calibrate_stacks(run: Run, batches: Mapping[str, Batches]) -> list[BlockRecord]:
    """Calibrate every stack in forward order; the calibrated student and each expert feed their own
    outputs to the next stack.
    """
    records: list[BlockRecord] = []
    handed: dict[str, EncoderOutputs] = {}
    streams = opened(run, batches)
    for source, stack in run.models.plan.in_order:
        tracks = started(run, source, stack, streams, handed)
        if run.folder and not records:
            # all batches have been read, so an earlier run's blocks can be told from another's
            digests = {task: stream.digest for task, stream in streams.items()}
            own = fingerprint(run.models, digests, run.settings, run.token_weights, run.block_drift)
            run.folder.resume(run.ranks.gathered({min(streams): own}), run.resume)
            run.ranks.together()  # blocks of another run are gone before anyone looks for them
        records += calibrate_stack(run, stack, tracks, source.feeds if source else "")
        handed = handed_over(run, stack, tracks) if stack.feeds else {}
    return records


def opened(run: Run, batches: Mapping[str, Batches]) -> dict[str, Stream]:
    """Return the batches of every task; reading the very first one checks that the plan replays
    the model exactly.
    """
    streams = {}
    for number, task in enumerate(sorted(run.models.experts)):

        def check(batch: Mapping[str, Any], task: str = task) -> None:
            student = run.models.student.module
            check_batch(task, 0, batch, student)
            with naming(task, 0):
                check_replay(
                    student, run.models.plan, on_device(first_samples(batch), run.models.device)
                )

        kept = SpooledList(run.spool) if len(run.models.plan.stacks) > 1 else None
        streams[task] = Stream(batches[task], kept, check if number == 0 else None)
    return streams


def started(
    run: Run,
    source: Stack | None,
    stack: Stack,
    streams: Mapping[str, Stream],
    handed: Mapping[str, EncoderOutputs],
) -> dict[str, StudentTeacherFeatures]:
    """Return both tracks of every task before the first block of a stack."""
    tracks = {}
    with run.models.student.running() as student:
        for task, expert in run.models.experts.items():
            with expert.running() as teacher:
                given = (on_device(batch, run.models.device) for batch in streams[task])
                tracks[task] = start_tracks(
                    task, student, teacher, stack, given, run.spool, source, handed.get(task)
                )
    return tracks


def handed_over(
    run: Run, stack: Stack, tracks: Mapping[str, StudentTeacherFeatures]
) -> dict[str, EncoderOutputs]:
    """Return what a stack feeds to the next one, by task."""
    handed = {}
    with run.models.student.running() as student:
        for task, expert in run.models.experts.items():
            with expert.running() as teacher:
                ours = hand_on(student, stack, tracks[task].student)
                theirs = hand_on(teacher, stack, tracks[task].teacher)
                handed[task] = EncoderOutputs(ours, theirs, tracks[task].masks)
    return handed


def calibrate_stack(
    run: Run, stack: Stack, tracks: Mapping[str, StudentTeacherFeatures], fed: str
) -> list[BlockRecord]:
    """Calibrate every block of one stack in forward order."""
    count, records = len(blocks_of(run.models.student.module, stack)), []
    rule = weighing(run.token_weights) if run.token_weights else run.models.plan.rule(stack)
    for index in range(count):
        start = time.perf_counter()
        with run.models.student.block(f"{stack.blocks}.{index}") as block:
            modules = calibrated_modules(block, run.settings.norm, run.settings.modules)
            residual = run.settings.residual_at(index / max(count - 1, 1))
            last = index + 1 == count
            view = BlockView(block_name(stack, index), stack, last, modules, rule, fed, residual)
            if not run.solves:
                watch_block(run, block, f"{stack.blocks}.{index}", tracks, view)
                continue
            record, known = calibrated_or_known(run, block, f"{stack.blocks}.{index}", tracks, view)
        records.append(record)
        if run.progress:
            run.progress(
                line(record, run.tasks, time.perf_counter() - start)
                + ("  (solved before)" if known else "")
            )
    return records


def weighing(rule: TokenRule) -> TokenRule:
    """Check the weights of a caller's token rule. Raises, when called: BadSetting."""

    def weights(module: str, last: bool, shape: tuple[int, ...]) -> Tensor:
        try:
            found: object = rule(module, last, shape)
        except TypeError as error:
            found = error
        fine = isinstance(found, Tensor) and found.shape == shape
        expected = "must be a function (module name, last block?, (batch, tokens)) -> weights, a tensor of that shape"
        require(
            fine,
            "calibrate.token_weights",
            found if isinstance(found, TypeError) else type(found).__name__,
            expected,
        )
        assert isinstance(found, Tensor)
        return found

    return weights


def watch_block(
    run: Run,
    block: nn.Module,
    path: str,
    tracks: Mapping[str, StudentTeacherFeatures],
    view: BlockView,
) -> None:
    """Observe a block for every task without solving it, and move the tracks on. Raises: as
    `observe`.
    """
    parts = block_parts(block, tracks, view, run.settings)
    for number, part in enumerate(parts):
        for task, teacher in in_turn(run.models.experts, path):
            observe(block, teacher, tracks[task], part, number == last_with_teacher(parts))
    for task in tracks:
        advance(block, view.stack, tracks[task].student)


def calibrated_or_known(
    run: Run,
    block: nn.Module,
    path: str,
    tracks: Mapping[str, StudentTeacherFeatures],
    view: BlockView,
) -> tuple[BlockRecord, bool]:
    """Calibrate a block and keep the solution, or load the one that an earlier run kept (then
    True).
    """
    models, folder = run.models, run.folder
    known = folder.solved(view.name) if folder else None
    if known:
        run.known.add(view.name)
        replay_block(
            block, known.parameters, in_turn(models.experts, path), tracks, view, run.settings
        )
        return known.record, True

    record = calibrate_block(
        block,
        models.base.block(path),
        partial(in_turn, models.experts, path),
        tracks,
        view,
        run.settings,
        run.ranks,
        partial(models.round_to_stored_dtype, path, block),
        run.block_drift,
    )
    if folder:
        folder.keep(view.name, solved_parameters(block, view.modules), record)
    return record, False
