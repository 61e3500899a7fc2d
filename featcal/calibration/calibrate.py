"""Calibrate a merged model from folders to a folder, or from modules to a module."""

import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from featcal.calibration.block import calibrate_block, replay_block
from featcal.calibration.features import (
    NO_SAMPLES,
    EncoderOutputs,
    Spool,
    SpooledList,
    StudentTeacherFeatures,
    advance,
    first_features,
    on_device,
    stack_outputs,
)
from featcal.calibration.models import Models, open_models
from featcal.calibration.observe import BlockSpec, block_parts, observe, solved_parameters
from featcal.calibration.ranks import current
from featcal.calibration.report import BlockRecord, Result, measure_drift, progress_line
from featcal.calibration.resume import Digest, RunFolder, block_name, fingerprint, scratch_folder
from featcal.calibration.write import calibration_card, write_calibrated
from featcal.core.moments import TokenRule
from featcal.core.precision import exact_products
from featcal.errors import BadBatches, BadFile, BadSetting
from featcal.models.batch import (
    Batch,
    Batches,
    Model,
    TaskBatches,
    check_batch,
    check_tasks,
    first_samples,
    naming,
)
from featcal.models.modules import solved_modules
from featcal.models.plan import BlockPlan, Stack, blocks_of
from featcal.models.replay import check_replay
from featcal.models.save import require_replaceable
from featcal.models.streamed import InMemoryModel, ModelHandle, StreamedModel, in_turn
from featcal.settings import Calibration, require

# of a GPU's free memory, for features; blocks, sums and one batch at work need the rest
GPU_SHARE = 0.25
PAPER = Calibration()
LOG = logging.getLogger("featcal")


def calibrate(
    merged: Model,
    *,
    base: Model,
    experts: Mapping[str, Model],
    batches: Mapping[str, Batches],
    settings: Calibration = PAPER,
    out: str | Path | None = None,
    held_out: Mapping[str, Batches] | None = None,
    plan: BlockPlan | None = None,
    token_weights: TokenRule | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    host_memory: int | None = None,
    work: str | Path | None = None,
    resume: bool = True,
    block_drift: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Result:
    """Calibrate a merged model to its experts' features, block by block in forward order and in
    closed form (Algorithm 1).

    Models given as folders are streamed: only the current block is in memory, and the next expert's
    block is read ahead. Of a whole CLIP the vision tower is calibrated. Given modules are not
    modified.

    Args:
        merged, base, experts: modules or checkpoint folders of one architecture.
        batches: per task an iterable of keyword mappings for the model's forward, such as
            {"pixel_values": x} (T5: {"input_ids": i, "attention_mask": m, "labels": l}). Read once;
            kept for models with several stacks.
        settings: λ, ρ, α and the switches of the method. Default: the paper's for CLIP.
        out: folder to write instead of returning the model, in the merged folder's precision. Its
            tokenizer and other files come from the merged folder, or from the base folder where
            the merged model is a module.
        held_out: batches of further samples. On them the result reports how far the merged and the
            calibrated model are from each expert; a task without any is measured on its own
            `batches` if they can be read twice. Default: no measurement.
        plan: the model's blocks. Default: looked up or inferred.
        token_weights: (module name, last block?, (batch, tokens)) -> weights of that shape.
            Default: the family's rule.
        device: device of models given as folders. Default: CPU. Modules stay where they are, and
            batches follow them.
        dtype: precision in which folders are calibrated. Default: that of `merged` if it is a
            module, else float32.
        host_memory: cap on cached activations in RAM, in bytes; the rest goes to disk. Default: no
            cap. With a cap, freed memory is returned to the system at once, which can take a
            quarter more time.
        work: scratch folder for activations and, with `out`, for solved blocks. Default: next to
            `out`.
        resume: continue from the blocks solved by an interrupted run with the same models, batches
            and settings.
        block_drift: measure the drift after every block, which takes one more pass through the last
            block.
        progress: called with one line of text per block; the logger "featcal" gets the same lines.

    Returns: Result with model (None with `out`), folder (None without), a record per block and,
        with `held_out`, the drift from every expert.
    Raises: FeatCalError for models or batches that do not fit, before any block is changed.
    """
    ranks = current()
    default = tempfile.gettempdir() if out is None else scratch_folder(Path(out))
    scratch = Path(work or default)
    with removed_scratch(scratch, out), ranks.fail_together(), ExitStack() as opened:
        check_arguments(experts, batches, settings, out, held_out, host_memory, scratch)
        own = {task: experts[task] for task in ranks.mine(experts)}
        models = open_models(
            merged, base, own, plan, settings, whole=out is None, device=device, dtype=dtype
        )
        opened.enter_context(models.evaluated())
        opened.enter_context(exact_products())
        folder = None if out is None else opened.enter_context(RunFolder(scratch, ranks.first))
        spool = opened.enter_context(Spool(*budgets(models.device, host_memory), scratch))

        streams = {task: BatchStream(batches[task], models.plan, spool) for task in models.experts}
        task, stream = next(iter(streams.items()))
        for batch in stream.head():
            check_plan(models, task, batch, [models.student])

        blocks: list[BlockRecord] = []
        encoder: dict[str, EncoderOutputs] = {}
        for source, stack in models.plan.in_order:
            features = features_by_task(models, stack, streams, spool, source, encoder)
            if folder and not blocks:  # by now all batches have been read
                digests = {task: stream.digest for task, stream in streams.items()}
                own_print = fingerprint(models, digests, settings, token_weights, block_drift)
                folder.resume(ranks.gathered({min(streams): own_print}), resume)
                ranks.together()  # no rank reads a block before those of another run are removed
            start = time.perf_counter()
            for path, student, spec in student_blocks(
                models, stack, source, settings, token_weights
            ):
                solved = folder.solved(spec.name) if folder else None
                if solved:
                    parameters, record = solved
                    replay_block(models, path, student, features, spec, settings, parameters)
                else:
                    record = calibrate_block(
                        models, path, student, features, spec, settings, ranks, block_drift
                    )
                    if folder:
                        folder.keep(spec.name, solved_parameters(student, spec), record)
                blocks.append(record)
                if ranks.first:
                    seconds, start = time.perf_counter() - start, time.perf_counter()
                    line = progress_line(record, len(experts), seconds, resumed=bool(solved))
                    LOG.info(line)
                    if progress:
                        progress(line)
            encoder = encoder_outputs(models, stack, features)

        drift = []
        if held_out is not None:
            before_after = merged_and_calibrated(models, merged, folder)
            by_task = ranks.gathered(measure_drift(models, *before_after, batches, held_out))
            drift = [record for records in by_task.values() for record in records]

        if out is None or folder is None:
            return Result(models.student.module, None, blocks, drift)
        if ranks.first:
            card = calibration_card(merged, base, experts, settings, blocks, drift=drift)
            write_calibrated(models, out, settings, blocks, drift, folder, card)
    folder.remove()
    return Result(None, Path(out), blocks, drift)


def check(
    merged: Model,
    *,
    base: Model,
    experts: Mapping[str, Model],
    batches: TaskBatches,
    settings: Calibration,
    plan: BlockPlan | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Check models and batches as `calibrate` does, on two samples of each task and without
    solving. Raises: as `calibrate`.
    """
    check_tasks(experts, batches)
    models = open_models(
        merged, base, experts, plan, settings, whole=False, device=device, dtype=dtype
    )
    spool = Spool(*budgets(models.device, None), tempfile.gettempdir())
    with models.evaluated(), exact_products(), spool:
        samples = {}
        for task, expert in models.experts.items():
            head = list(islice(batches[task], 1))
            if not head:
                raise BadBatches(task, NO_SAMPLES)
            samples[task] = [check_plan(models, task, head[0], [models.student, expert])]
        encoder: dict[str, EncoderOutputs] = {}
        for source, stack in models.plan.in_order:
            features = features_by_task(models, stack, samples, spool, source, encoder)
            for path, student, spec in student_blocks(models, stack, source, settings):
                for part in block_parts(
                    student, next(iter(features.values())), spec, settings.order
                ):
                    for task, teacher in in_turn(models.experts, path):
                        observe(student, teacher, features[task], part)
                for own in features.values():
                    advance(student, stack, own.student)
            encoder = encoder_outputs(models, stack, features)


def check_arguments(
    experts: Mapping[str, Model],
    batches: TaskBatches,
    settings: Calibration,
    out: str | Path | None,
    held_out: TaskBatches | None,
    host_memory: int | None,
    scratch: Path,
) -> None:
    """Raise BadBatches or BadSetting for arguments of `calibrate` that cannot be used."""
    check_tasks(experts, batches)
    given, expected = type(settings).__name__, "must be a featcal.Calibration"
    require(isinstance(settings, Calibration), "settings", given, expected)
    fits = host_memory is None or host_memory >= 0
    require(fits, "host_memory", host_memory, "must be a number of bytes, at least 0")
    if out is not None:
        require_replaceable(Path(out))
        require(not scratch.is_file(), "work", str(scratch), "names a file; name a folder")
    for task, own in (held_out or {}).items():
        if not isinstance(own, Iterable):
            kind = type(own).__name__
            raise BadBatches(task, f"is held out as {kind}; expected a list of mappings")
        if task not in experts:
            known = f"there are: {', '.join(sorted(experts))}"
            raise BadBatches(task, f"is held out, but no expert has this name; {known}")


@contextmanager
def removed_scratch(scratch: Path, out: str | Path | None) -> Iterator[None]:
    """Raise BadFile if another program removes the scratch folder during the run."""
    try:
        yield
    except FileNotFoundError as error:
        if out is None or scratch.exists():
            raise
        problem = f"was removed while a calibration worked in it ({error.filename})"
        raise BadFile(scratch, problem, "start the same run again") from None


def budgets(device: torch.device, host_memory: int | None) -> tuple[int, int]:
    """Return the bytes of features to keep on the device and in host memory."""
    on_gpu = int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE) if device.type == "cuda" else 0
    return on_gpu, sys.maxsize if host_memory is None else host_memory


class BatchStream:
    """Batches of one task, read once and digested; kept for plans with several stacks."""

    def __init__(self, batches: Batches, plan: BlockPlan, spool: Spool):
        """Start before the first batch."""
        self._batches, self._digest = iter(batches), Digest()
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
                self._digest.add(
                    *batch, *(x for x in tree_leaves(dict(batch)) if torch.is_tensor(x))
                )
            if self._kept is not None:
                self._kept.append(batch)
            yield batch

    @property
    def digest(self) -> str:
        """Return the digest of all batches, once they have been read."""
        return str(self._digest)


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
    stack: Stack,
    batches: TaskBatches,
    spool: Spool,
    source: Stack | None,
    encoder: Mapping[str, EncoderOutputs],
) -> dict[str, StudentTeacherFeatures]:
    """Return the features of every task before the first block of a stack, which `source` feeds."""
    features = {}
    with models.student.running() as student:
        for task, expert in models.experts.items():
            with expert.running() as teacher:
                moved = (on_device(batch, models.device) for batch in batches[task])
                features[task] = first_features(
                    task, student, teacher, stack, moved, spool, source, encoder.get(task)
                )
    return features


def encoder_outputs(
    models: Models, stack: Stack, features: Mapping[str, StudentTeacherFeatures]
) -> dict[str, EncoderOutputs]:
    """Return what a calibrated stack and the experts' stacks feed to the next stack, by task."""
    outputs: dict[str, EncoderOutputs] = {}
    if stack.feeds:
        with models.student.running() as student:
            for task, expert in models.experts.items():
                with expert.running() as teacher:
                    outputs[task] = EncoderOutputs(
                        stack_outputs(student, stack, features[task].student),
                        stack_outputs(teacher, stack, features[task].teacher),
                        features[task].masks,
                    )
    return outputs


def student_blocks(
    models: Models,
    stack: Stack,
    source: Stack | None,
    settings: Calibration,
    token_weights: TokenRule | None = None,
) -> Iterator[tuple[str, nn.Module, BlockSpec]]:
    """Yield path, block and specification of the student's blocks in forward order, one in memory
    at a time.
    """
    rule = checked_rule(token_weights) if token_weights else models.plan.rule(stack)
    count = len(blocks_of(models.student.module, stack))
    for index in range(count):
        path = f"{stack.blocks}.{index}"
        with models.student.block(path) as student:
            linears, norms = solved_modules(student, settings.norm, settings.modules)
            yield (
                path,
                student,
                BlockSpec(
                    name=block_name(stack, index),
                    stack=stack,
                    linears=tuple(linears),
                    norms=tuple(norms),
                    token_rule=rule,
                    last=index + 1 == count,
                    encoder_keyword=source.feeds if source else "",
                    residual=settings.residual_at(index / max(count - 1, 1)),
                ),
            )


def checked_rule(rule: TokenRule) -> TokenRule:
    """Return a caller's token rule with a check of its weights. Raises, when called: BadSetting."""

    def weights(module: str, last: bool, shape: tuple[int, ...]) -> Tensor:
        try:
            w: object = rule(module, last, shape)
        except TypeError as error:
            w = error
        if not (isinstance(w, Tensor) and w.shape == shape):
            given = w if isinstance(w, TypeError) else type(w).__name__
            expected = (
                "must be a function (module name, last block?, (batch, tokens)) -> weights, a "
                "tensor of that shape"
            )
            raise BadSetting("calibrate.token_weights", given, expected)
        return w

    return weights


def merged_and_calibrated(
    models: Models, merged: Model, folder: RunFolder | None
) -> tuple[ModelHandle, ModelHandle]:
    """Return the merged model as it was given, and the calibrated model."""
    if isinstance(merged, nn.Module):
        return InMemoryModel(merged), models.student
    paths = [stack.blocks for stack in models.plan.stacks]
    given: dict[str, Any] = {
        "dtype": models.dtype,
        "device": models.device,
        "ledger": models.ledger,
    }
    streamed = partial(StreamedModel, merged, paths, **given)
    if isinstance(models.student, StreamedModel):
        assert folder is not None
        return models.student, streamed(override=folder.solved_values(models.plan))
    return streamed(), models.student
