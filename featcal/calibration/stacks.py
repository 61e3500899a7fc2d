"""Every block of every stack, in forward order: what runs between opening the models and writing
the result.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from featcal.blocks.batches import check_batch, first_samples, naming
from featcal.blocks.linear import weight_of
from featcal.blocks.plan import Stack, blocks_of
from featcal.blocks.replay import check_replay
from featcal.calibration.batches import Stream, on_device
from featcal.calibration.block import calibrate_block, replay_block
from featcal.calibration.fingerprint import fingerprint
from featcal.calibration.models import Models
from featcal.calibration.observe import BlockView, Observation, observe
from featcal.calibration.parts import block_parts, last_with_teacher
from featcal.calibration.published import Published
from featcal.calibration.ranks import Ranks
from featcal.calibration.record import BlockRecord, line
from featcal.calibration.run_folder import RunFolder, block_name
from featcal.calibration.sites import (
    Modules,
    calibrated_modules,
    has_kernel_form,
    solved_parameters,
)
from featcal.calibration.spooled_list import SpooledList
from featcal.calibration.tracks import HandedOn, Tracks, advance, hand_on, start_tracks
from featcal.core.weighting import TokenRule
from featcal.models.residency import Held, in_turn
from featcal.settings import Calibration, require
from featcal.storage.spool import Spool

Batches = Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class Run:
    """What stays the same from stack to stack."""

    models: Models  # with the experts of this process
    tasks: int  # of all processes
    settings: Calibration
    token_weights: TokenRule | None
    spool: Spool
    folder: RunFolder | None
    resume: bool
    ranks: Ranks
    progress: Callable[[str], None] | None
    published: Mapping[str, Published] = field(default_factory=dict)  # tasks without samples
    block_drift: bool = True  # or the samples run through the last block of all just once
    known: set[str] = field(default_factory=set)  # blocks whose solutions came from an earlier run
    solves: bool = True  # or blocks are watched as if they were to be solved, and stay as they are

    @property
    def sampled(self) -> dict[str, Held]:
        """The experts of tasks with samples."""
        return {
            task: expert
            for task, expert in self.models.experts.items()
            if task not in self.published
        }


def calibrate_stacks(run: Run, batches: Mapping[str, Batches]) -> list[BlockRecord]:
    """Every stack in forward order; what one feeds to the next comes from the calibrated student
    and from each expert.
    """
    records: list[BlockRecord] = []
    handed: dict[str, HandedOn] = {}
    streams = opened(run, batches)
    for source, stack in run.models.plan.in_order:
        tracks = started(run, source, stack, streams, handed)
        if run.folder and not records:
            go_on(run, run.folder, streams)
        records += calibrate_stack(run, stack, tracks, source.feeds if source else "")
        handed = handed_over(run, stack, tracks) if stack.feeds else {}
    return records


def opened(run: Run, batches: Mapping[str, Batches]) -> dict[str, Stream]:
    """The batches of every task; the very first one also proves that the plan replays the model
    exactly.
    """
    streams = {}
    for number, task in enumerate(sorted(run.sampled)):

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
    handed: Mapping[str, HandedOn],
) -> dict[str, Tracks]:
    """Both tracks of every task before the first block of a stack."""
    tracks = {}
    with run.models.student.running() as student:
        for task, expert in run.sampled.items():
            with expert.running() as teacher:
                given = (on_device(batch, run.models.device) for batch in streams[task])
                apart = run.settings.holds_out
                tracks[task] = start_tracks(
                    task, student, teacher, stack, given, run.spool, source, handed.get(task), apart
                )
    return tracks


def handed_over(run: Run, stack: Stack, tracks: Mapping[str, Tracks]) -> dict[str, HandedOn]:
    """What a stack feeds to the next one, of every task."""
    handed = {}
    with run.models.student.running() as student:
        for task, expert in run.sampled.items():
            with expert.running() as teacher:
                ours = hand_on(student, stack, tracks[task].student)
                theirs = hand_on(teacher, stack, tracks[task].teacher)
                handed[task] = HandedOn(ours, theirs, tracks[task].masks)
    return handed


def go_on(run: Run, folder: RunFolder, streams: Mapping[str, Stream]) -> None:
    """Keep what an earlier run has solved, now that all batches have been read and it is clear
    whether it was the same.
    """
    digests = {task: stream.digest for task, stream in (*streams.items(), *run.published.items())}
    own = fingerprint(run.models, digests, run.settings, run.token_weights, run.block_drift)
    folder.resume(run.ranks.gathered({min(streams): own}), run.resume)
    run.ranks.together()  # what another run has left is gone before anyone looks for it


def calibrate_stack(
    run: Run, stack: Stack, tracks: Mapping[str, Tracks], fed: str
) -> list[BlockRecord]:
    """Every block of one stack in forward order."""
    count, records = len(blocks_of(run.models.student.module, stack)), []
    rule = weighing(run.token_weights) if run.token_weights else run.models.plan.rule(stack)
    for index in range(count):
        start = time.perf_counter()
        with run.models.student.block(f"{stack.blocks}.{index}") as block:
            modules = calibrated_modules(block, run.settings.norm, run.settings.modules)
            residual = run.settings.residual_at(index / max(count - 1, 1))
            more: Any = {
                "attention": run.settings.weights == "attention",
                "spread": run.settings.shrinkage == "ledoit_wolf",
            }
            more["tokens"] = kept_tokens(run, block, modules, tracks)
            view = BlockView(
                block_name(stack, index),
                stack,
                index + 1 == count,
                modules,
                rule,
                fed,
                residual,
                **more,
            )
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


def kept_tokens(
    run: Run, block: nn.Module, modules: Modules, tracks: Mapping[str, Tracks]
) -> int | None:
    """The tokens of all tasks where some linear reads more features than that and is solved by them
    (`core.kernel`).
    """
    tokens = sum(track.tokens for track in tracks.values())
    widest = max(
        (weight_of(block.get_submodule(name)).shape[1] for name in modules.linears), default=0
    )
    kernel = has_kernel_form(run.settings, run.ranks.world) and not run.published
    return tokens if kernel and tokens < widest else None


def weighing(rule: TokenRule) -> TokenRule:
    """A caller's rule for token weights. Raises, when called: BadSetting where it is none."""

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
    run: Run, block: nn.Module, path: str, tracks: Mapping[str, Tracks], view: BlockView
) -> None:
    """All that is looked at before a block is solved, of every task; the tracks move on. Raises:
    what `observe` raises.
    """
    parts = block_parts(block, tracks, view, run.settings)
    for number, part in enumerate(parts):
        for task, teacher in in_turn(run.sampled, path):
            observe(
                block, teacher, tracks[task], part, number == 0, number == last_with_teacher(parts)
            )
    for task in tracks:
        advance(block, view.stack, tracks[task].student)


def calibrated_or_known(
    run: Run, block: nn.Module, path: str, tracks: Mapping[str, Tracks], view: BlockView
) -> tuple[BlockRecord, bool]:
    """Calibrate a block and keep the solution, or take the solution that an earlier run has kept
    (then True).
    """
    models, folder = run.models, run.folder
    known = folder.solved(view.name) if folder else None
    if known:
        run.known.add(view.name)
        replay_block(
            block, known.parameters, in_turn(run.sampled, path), tracks, view, run.settings
        )
        return known.record, True

    def teachers() -> Iterable[tuple[str, nn.Module]]:
        return in_turn(models.experts, path)

    def published(task: str, teacher: nn.Module) -> Observation:
        return run.published[task].observation(path, teacher, view.modules)

    how: Any = view, run.settings, run.ranks
    more: Any = partial(models.settle, path, block), published, run.block_drift
    record = calibrate_block(block, models.base.block(path), teachers, tracks, *how, *more)
    if folder:
        folder.keep(view.name, solved_parameters(block, view.modules), record)
    return record, False
