"""Measure how far the merged and the calibrated model are from every expert, on the same samples."""

import logging
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from featcal.calibration.drift import expert_drift
from featcal.calibration.features import Spool, on_device
from featcal.calibration.models import open_models
from featcal.calibration.ranks import current
from featcal.calibration.report import DriftRecord, Result, rounded
from featcal.calibration.resume import RunFolder, Solved, beside, block_name
from featcal.calibration.stacks import Run, calibrate_stacks
from featcal.calibration.write import calibration_card, write_calibrated
from featcal.core.moments import TokenRule
from featcal.core.precision import exact_products
from featcal.errors import BadBatches, BadFile
from featcal.models.batch import Batches, Model, check_batch, check_tasks, first_samples, naming
from featcal.models.load import evaluation_mode
from featcal.models.plan import BlockPlan
from featcal.models.replay import check_replay
from featcal.models.save import require_replaceable
from featcal.models.streamed import InMemoryModel, ModelHandle, StreamedModel
from featcal.settings import Calibration, require


def measured_drift(
    run: Run, merged: Model, batches: Mapping[str, Batches], held_out: Mapping[str, Batches]
) -> list[DriftRecord]:
    """Return a record for every expert and stack, sorted by name, once all blocks are solved.

    Tasks that are not in `held_out` are measured on their calibration samples, unless these are a
    consumed iterator.
    """
    models, found = two_models(run, merged), {}
    with evaluation_mode([held.module for held in models.values()]):
        for task, expert in run.models.experts.items():
            own = held_out.get(task, () if isinstance(batches[task], Iterator) else batches[task])
            drift, samples = expert_drift(
                task, models, expert, run.models.plan, own, run.models.device
            )
            found[task] = [
                DriftRecord(
                    task,
                    stack,
                    *(rounded(of[name].relative) for name in models),
                    *(rounded(of[name].cosine) for name in models),
                    samples,
                    task in held_out,
                )
                for stack, of in drift.items()
                if samples
            ]
    return [record for records in run.ranks.gathered(found).values() for record in records]


def two_models(run: Run, merged: Model) -> dict[str, ModelHandle]:
    """Return the merged model as given, and the calibrated model."""
    student, plan = run.models.student, run.models.plan
    if isinstance(merged, nn.Module):
        return {"merged": InMemoryModel(merged), "calibrated": student}
    given: dict[str, Any] = {
        "dtype": run.models.dtype,
        "device": run.models.device,
        "ledger": run.models.ledger,
    }
    given |= {"blocks": [stack.blocks for stack in plan.stacks]}
    if isinstance(student, StreamedModel):
        assert run.folder is not None
        return {
            "merged": student,
            "calibrated": StreamedModel(merged, **given, override=solved_values(plan, run.folder)),
        }
    return {"merged": StreamedModel(merged, **given), "calibrated": student}


def solved_values(plan: BlockPlan, folder: RunFolder) -> Callable[[str], Tensor | None]:
    """Return a function from a parameter's name to its solved value, or None if it is not solved."""

    @lru_cache(maxsize=1)
    def block(name: str) -> Solved | None:
        return folder.solved(name)

    def value(name: str) -> Tensor | None:
        for stack in plan.stacks:
            if name.startswith(f"{stack.blocks}."):
                index, _, inner = name.removeprefix(f"{stack.blocks}.").partition(".")
                solved = block(block_name(stack, int(index)))
                return solved.parameters.get(inner) if solved else None
        return None

    return value


GPU_SHARE = (
    0.25  # of free memory, for activations; blocks, sums and one batch at work need the rest
)

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
    ranks, place = (
        current(),
        Path(work)
        if work
        else beside(Path(out))
        if out is not None
        else Path(tempfile.gettempdir()),
    )
    with (
        still_there(place, out is not None),
        ranks.fail_together(),
        ExitStack() as open_,
    ):
        check_tasks(experts, batches)
        require(
            isinstance(settings, Calibration),
            "settings",
            type(settings).__name__,
            "must be a featcal.Calibration",
        )
        fits = host_memory is None or host_memory >= 0
        require(fits, "host_memory", host_memory, "must be a number of bytes, at least 0")
        if out is not None:
            require_replaceable(Path(out))
            require(not place.is_file(), "work", str(place), "names a file; name a folder")
        for task, given in (held_out or {}).items():
            if not isinstance(given, Iterable):
                raise BadBatches(
                    task, f"is held out as {type(given).__name__}; expected a list of mappings"
                )
            if task not in experts:
                raise BadBatches(
                    task,
                    f"is held out, but no expert has this name; there are: {', '.join(sorted(experts))}",
                )
        mine = {task: experts[task] for task in ranks.mine(experts)}
        models = open_models(
            merged, base, mine, plan, settings, whole=out is None, device=device, dtype=dtype
        )
        open_.enter_context(models.evaluated())
        open_.enter_context(exact_products())
        folder = (
            open_.enter_context(RunFolder(place, writes=ranks.first)) if out is not None else None
        )
        spool = open_.enter_context(Spool(*budgets(models.device, host_memory), place))
        telling = told(progress) if ranks.first else None
        run = Run(
            models,
            len(experts),
            settings,
            token_weights,
            spool,
            folder,
            resume,
            ranks,
            telling,
            block_drift,
        )
        blocks = calibrate_stacks(run, batches)
        drift = measured_drift(run, merged, batches, held_out) if held_out is not None else []
        if out is None or folder is None:
            return Result(models.student.module, None, blocks, drift)
        if ranks.first:
            card = calibration_card(merged, base, experts, settings, blocks, drift=drift)
            write_calibrated(models, out, settings, blocks, drift, folder, card)
    folder.remove()
    return Result(None, Path(out), blocks, drift)


@contextmanager
def still_there(place: Path, ours: bool) -> Iterator[None]:
    """Raise BadFile where somebody has removed the folder that a run works in."""
    try:
        yield
    except FileNotFoundError as error:
        if not ours or place.exists():
            raise
        raise BadFile(
            place,
            f"was removed while a calibration worked in it ({error.filename})",
            "start the same run again",
        ) from None


def check(
    merged: Model,
    *,
    base: Model,
    experts: Mapping[str, Model],
    batches: Mapping[str, Batches],
    settings: Calibration,
    plan: BlockPlan | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Check models and batches as `calibrate` does, on two samples of each task and without
    solving. Raises: as `calibrate`.
    """
    check_tasks(experts, batches)
    models, samples = (
        open_models(merged, base, experts, plan, settings, whole=False, device=device, dtype=dtype),
        {},
    )
    with models.evaluated(), exact_products():
        for task, expert in models.experts.items():
            batch = next(iter(batches[task]), None)
            if batch is None:
                raise BadBatches(
                    task, "is empty; calibration needs at least one batch with at least one sample"
                )
            check_batch(task, 0, batch, models.student.module)
            samples[task] = [on_device(first_samples(batch), models.device)]
            for held in (models.student, expert):
                with naming(task, 0), held.running() as model:
                    check_replay(model, models.plan, samples[task][0])
        with Spool(*budgets(models.device, None), Path(tempfile.gettempdir())) as spool:
            run = Run(
                models,
                len(experts),
                settings,
                None,
                spool,
                None,
                False,
                current(),
                None,
                solves=False,
            )
            calibrate_stacks(run, samples)


def told(progress: Callable[[str], None] | None) -> Callable[[str], None]:
    """Return a function that sends each line to the log and then to `progress`."""

    def both(text: str) -> None:
        LOG.info(text)
        if progress:
            progress(text)

    return both


def budgets(device: torch.device, host_memory: int | None) -> tuple[int, int]:
    """Return the bytes of activations to keep on the device and in host memory."""
    on_gpu = int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE) if device.type == "cuda" else 0
    return on_gpu, sys.maxsize if host_memory is None else host_memory
