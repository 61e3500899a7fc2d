"""Algorithm 1 over all blocks of one or several students, which share the passes of their teachers."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, islice

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from featcal.calibration.block import StudentBlock, calibrate_block, replay_block
from featcal.calibration.features import (
    Spool,
    SpooledList,
    StudentTeacherFeatures,
    first_features,
    leave_stack,
    on_device,
)
from featcal.calibration.models import Models
from featcal.calibration.observe import BlockSpec, solved_parameters
from featcal.calibration.ranks import Ranks
from featcal.calibration.report import BlockRecord
from featcal.calibration.resume import Digest, RunFolder, block_name, fingerprint
from featcal.core.moments import TokenRule
from featcal.errors import BadSetting
from featcal.models.batch import Batch, Batches, TaskBatches, check_batch, first_samples, naming
from featcal.models.blocks import check_replay
from featcal.models.modules import solved_modules
from featcal.models.plan import BlockPlan, Stack, blocks_of
from featcal.models.streamed import ModelHandle
from featcal.settings import Calibration, require

EXPECTED_RULE = "must be a function (module name, last block?, (batch, tokens)) -> weights, a tensor of that shape"


@dataclass
class Student:
    """One model that is calibrated with its settings; solved blocks are kept in `folder`."""

    handle: ModelHandle
    settings: Calibration
    folder: RunFolder | None = None
    blocks: list[BlockRecord] = field(default_factory=list)


def sweep(
    models: Models,
    students: Sequence[Student],
    batches: TaskBatches,
    spool: Spool,
    ranks: Ranks,
    *,
    token_weights: TokenRule | None = None,
    block_drift: bool = True,
    resume: bool = True,
    solve: bool = True,
    report: Callable[[list[BlockRecord], float, bool], None] = lambda *_: None,
) -> None:
    """Calibrate the students block by block, each with its settings, and record their blocks.

    solve: False only observes the blocks, as a check.
    report: called after each block with the students' records, seconds, and whether an earlier run
        had solved it.
    """
    streams = {task: BatchStream(batches[task], models.plan, spool) for task in models.experts}
    task, stream = next(iter(streams.items()))
    for batch in stream.head():
        check_plan(models, task, batch, [students[0].handle])
    handles = [student.handle for student in students]
    encoder: Mapping[str, StudentTeacherFeatures] = {}
    for source, stack in models.plan.in_order:
        features = features_by_task(models, handles, stack, streams, spool, source, encoder)
        if not students[0].blocks:  # by now all batches have been read
            digests = {task: str(stream.digest) for task, stream in streams.items()}
            for student in students:
                if student.folder:
                    given = digests, student.settings, token_weights, block_drift
                    own_print = fingerprint(models, *given)
                    student.folder.resume(ranks.gathered({min(streams): own_print}), resume)
            ranks.together()  # no rank reads a block before those of another run are removed
        start = time.perf_counter()
        for path, blocks in student_blocks(models, students, stack, source, token_weights):
            name = blocks[0][1].name
            kept = [student.folder.solved(name) for student in students if student.folder]
            solved = [one for one in kept if one]
            resumed = len(solved) == len(students)
            if resumed:
                replay_block(models, path, blocks, features, [one for one, _ in solved])
                records = [record for _, record in solved]
            else:
                records = calibrate_block(models, path, blocks, features, ranks, block_drift, solve)
            for student, (block, spec), record in zip(students, blocks, records, strict=True):
                student.blocks.append(record)
                if student.folder and not resumed:
                    student.folder.keep(name, solved_parameters(block, spec), record)
            seconds, start = time.perf_counter() - start, time.perf_counter()
            report(records, seconds, resumed)
        encoder = encoder_outputs(models, handles, stack, features)


class BatchStream:
    """Batches of one task, read once and digested; kept for plans with several stacks."""

    def __init__(self, batches: Batches, plan: BlockPlan, spool: Spool):
        """Start before the first batch."""
        self._batches, self.digest = iter(batches), Digest()
        self._kept = SpooledList(spool) if len(plan.stacks) > 1 else None

    def head(self) -> list[Batch]:
        """Return a list of the first batch, or of none; it is still to be read."""
        head = list(islice(self._batches, 1))
        self._batches = chain(head, self._batches)
        return head

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches, from the copies once they have been read."""
        if self._kept:
            yield from self._kept
            return
        for batch in self._batches:
            if isinstance(batch, Mapping):
                self.digest.add(
                    *batch, *(x for x in tree_leaves(dict(batch)) if torch.is_tensor(x))
                )
            if self._kept is not None:
                self._kept.append(batch)
            yield batch


def check_plan(
    models: Models, task: str, batch: Batch, handles: Iterable[ModelHandle]
) -> dict[str, object]:
    """Check on two samples that running the plan's blocks one by one gives the features of each
    model's own forward.

    Returns: the samples, on the models' device. Raises: BadBatches, BadPlan.
    """
    check_batch(task, 0, batch, models.student.module)
    samples = on_device(first_samples(batch), models.device)
    for handle in handles:
        with naming(task, 0), handle.running() as model:
            check_replay(model, models.plan, samples)
    return dict(samples)


def features_by_task(
    models: Models,
    students: Sequence[ModelHandle],
    stack: Stack,
    batches: TaskBatches,
    spool: Spool,
    source: Stack | None,
    encoder: Mapping[str, StudentTeacherFeatures],
) -> dict[str, StudentTeacherFeatures]:
    """Return the features of every task before the first block of a stack, which `source` feeds."""
    features = {}
    with ExitStack() as running:
        ours = [running.enter_context(student.running()) for student in students]
        for task, expert in models.experts.items():
            with expert.running() as teacher:
                moved = (on_device(batch, models.device) for batch in batches[task])
                features[task] = first_features(
                    task, ours, teacher, stack, moved, spool, source, encoder.get(task)
                )
    return features


def encoder_outputs(
    models: Models,
    students: Sequence[ModelHandle],
    stack: Stack,
    features: Mapping[str, StudentTeacherFeatures],
) -> Mapping[str, StudentTeacherFeatures]:
    """Return what calibrated stacks and the experts' stacks feed to the next stack, by task."""
    if not stack.feeds:
        return {}
    with ExitStack() as running:
        ours = [running.enter_context(student.running()) for student in students]
        for task, expert in models.experts.items():
            with expert.running() as teacher:
                for model, track in zip([*ours, teacher], features[task].tracks, strict=True):
                    leave_stack(model, stack, track)
    return features


def student_blocks(
    models: Models,
    students: Sequence[Student],
    stack: Stack,
    source: Stack | None,
    token_weights: TokenRule | None = None,
) -> Iterator[tuple[str, list[StudentBlock]]]:
    """Yield path, and the students' block with its specification, in forward order, one block of
    each in memory at a time.
    """
    rule = checked_rule(token_weights) if token_weights else models.plan.rule(stack)
    count = len(blocks_of(models.student.module, stack))
    for index in range(count):
        path = f"{stack.blocks}.{index}"
        with ExitStack() as opened:
            found = []
            for student in students:
                block = opened.enter_context(student.handle.block(path))
                settings = student.settings
                linears, norms = solved_modules(block, settings.norm, settings.modules)
                spec = BlockSpec(
                    name=block_name(stack, index),
                    stack=stack,
                    linears=tuple(linears),
                    norms=tuple(norms),
                    token_rule=rule,
                    last=index + 1 == count,
                    encoder_keyword=source.feeds if source else "",
                    settings=settings,
                )
                found.append((block, spec))
            yield path, found


def checked_rule(rule: TokenRule) -> TokenRule:
    """Return a caller's token rule with a check of its weights. Raises, when called: BadSetting."""

    def weights(module: str, last: bool, shape: tuple[int, ...]) -> Tensor:
        try:
            w: object = rule(module, last, shape)
        except TypeError as error:
            raise BadSetting("calibrate.token_weights", error, EXPECTED_RULE) from None
        valid = isinstance(w, Tensor) and w.shape == shape
        require(valid, "calibrate.token_weights", type(w).__name__, EXPECTED_RULE)
        return w

    return weights
