"""FeatCal's public function: a merged model, its base and its experts in, the calibrated model out
(Algorithm 1).
"""

import logging
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from featcal.blocks.batches import check_batch, check_tasks, first_samples, naming
from featcal.blocks.plan import BlockPlan
from featcal.blocks.replay import check_replay
from featcal.calibration.batches import on_device
from featcal.calibration.card import calibration_card
from featcal.calibration.measured import measured_drift
from featcal.calibration.models import Model, hold_models
from featcal.calibration.published import Published, check_published
from featcal.calibration.ranks import current
from featcal.calibration.record import Result
from featcal.calibration.run_folder import RunFolder, beside
from featcal.calibration.stacks import Batches, Run, calibrate_stacks
from featcal.calibration.write import write_calibrated
from featcal.core.precision import exact_products
from featcal.core.weighting import TokenRule
from featcal.errors import BadBatches, BadFile
from featcal.planning.cost import counting
from featcal.settings import Calibration, Natural, require
from featcal.storage.spool import Spool
from featcal.storage.writer import require_replaceable

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
    host_memory: Natural | None = None,
    work: str | Path | None = None,
    resume: bool = True,
    block_drift: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Result:
    """Calibrate the merged model's blocks to its experts' features, in forward order and in closed
    form.

    Of models given as folders only the current block is in memory, and the next expert's while the
    current one is at work; of a whole CLIP the vision tower is calibrated. Modules are not
    modified.

    Args:
        merged, base, experts: modules or checkpoint folders of one architecture.
        batches: per task an iterable of keyword mappings for the model's own forward, such as
        {"pixel_values": x}; read once,
            and kept for models with several stacks (T5: {"input_ids": i, "attention_mask": m,
            "labels": l}). Of some tasks Statistics(folder) instead, moments that their owners
            publish; see `Published` for what they are taken for.
        settings: λ, ρ, α and which parts are on; the paper's for CLIP where left out.
        out: a folder to write instead of returning the model: the merged folder's files with
        calibrated numbers in its own
            precision, where that was a folder; else the base folder's tokenizer and the like beside
            them, where that was one.
        held_out: batches like `batches` of samples that are in none of these: on them the result
        tells how far the merged model
            and the calibrated one are from each expert. A task without any is measured on its own
            `batches`, where these can be read twice. Nothing is measured where None.
        plan: which blocks the model has; looked up or inferred where None.
        token_weights: (module name, last block?, (batch, tokens)) -> weights of that shape; the
        family's rule where None.
        device: where blocks of folders are loaded to, the CPU where None; modules stay where they
        are, and batches follow them.
        dtype: precision in which folders are calibrated; that of `merged` where it is a module,
        else float32.
        host_memory: bytes of activations kept in memory, the rest goes to disk; all of them where
        None (a GPU also keeps
            some). Where told, freed memory is also given back to the system at once, which takes up
            to a quarter more time.
        work: a folder for activations and, with `out`, for the solved blocks a killed run goes on
        from; beside `out` where None.
        resume: go on from the blocks that an earlier run with the same models, batches and settings
        has solved.
        block_drift: tell of every block how far its features are from the experts'; the samples run
        through the last block once
            more for nothing else.
        progress: called with one line of text per block, which the logger "featcal" gets too.

    Returns: Result with model (None with `out`), folder (None without), one record per block, what
    the run cost, and
        with `held_out` the drift from every expert.
    Raises: FeatCalError, before the first block is touched, for models or batches that do not fit.
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
        counting() as meter,
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
        published = {task: given for task, given in batches.items() if isinstance(given, Published)}
        check_published(published, batches, settings, ranks.world == 1 and token_weights is None)
        samples = {task: given for task, given in batches.items() if task not in published}
        mine = {task: experts[task] for task in ranks.mine(experts)}
        models = hold_models(
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
            published,
            block_drift,
        )
        blocks = calibrate_stacks(run, meter.watched(samples))
        drift = measured_drift(run, merged, samples, held_out) if held_out is not None else []
        if out is None or folder is None:
            return Result(models.student.module, None, blocks, meter.cost(run, blocks), drift)
        if ranks.first:
            card = calibration_card(merged, base, experts, settings, blocks, drift=drift)
            write_calibrated(models, out, settings, blocks, drift, folder, card)
        cost = meter.cost(run, blocks)
    folder.remove()
    return Result(None, Path(out), blocks, cost, drift)


@contextmanager
def still_there(place: Path, ours: bool) -> Iterator[None]:
    """Turns what goes wrong once somebody has removed the folder that a run works in into
    BadFile.
    """
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
    """What `calibrate` finds out before it solves: every tensor there, alike and a number, and on
    two samples of each task blocks that replay the models and modules whose inputs can be seen.

    Raises: what `calibrate` raises for models and batches that do not fit.
    """
    check_tasks(experts, batches)
    models, samples = (
        hold_models(merged, base, experts, plan, settings, whole=False, device=device, dtype=dtype),
        {},
    )
    published = {task: given for task, given in batches.items() if isinstance(given, Published)}
    with models.evaluated(), exact_products():
        for task, expert in models.experts.items():
            if task in published:
                continue
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
                published,
                solves=False,
            )
            calibrate_stacks(run, samples)


def told(progress: Callable[[str], None] | None) -> Callable[[str], None]:
    """What is called with each line: the log, then who asked for it."""

    def both(text: str) -> None:
        LOG.info(text)
        if progress:
            progress(text)

    return both


def budgets(device: torch.device, host_memory: int | None) -> tuple[int, int]:
    """Bytes of activations on the device and in host memory: a share of what a GPU has free, and
    what was asked for.
    """
    on_gpu = int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE) if device.type == "cuda" else 0
    return on_gpu, sys.maxsize if host_memory is None else host_memory
