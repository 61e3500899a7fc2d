"""Calibrate a merged model from folders to a folder, or from modules to a module."""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, SupportsInt

import torch
from torch import Tensor, nn

from featcal.calibration import choose
from featcal.calibration.block import Run, Student, sweep
from featcal.calibration.features import Models, check_plan, open_models
from featcal.calibration.ranks import current
from featcal.calibration.scratch import RunFolder, Spool, copy_with, scratch_folder
from featcal.card import RECORD, BlockRecord, Result, calibration_card, write_card
from featcal.core.moments import TokenRule
from featcal.core.precision import exact_products
from featcal.errors import LOG, BadCapture, BadSetting, SingularGram, counted
from featcal.files import atomic_folder, claimed, require_apart
from featcal.models.batch import Batches, Model, TaskBatches, check_tasks, sample_count
from featcal.models.load import load_as_calibrated, require_replaceable, save_model
from featcal.models.modules import check_blocks, packed_experts
from featcal.models.plan import BlockPlan
from featcal.models.streamed import InMemoryModel, ModelHandle, StreamedModel
from featcal.settings import Calibration, require

# share of a GPU's free memory for features; blocks, sums and the current batch need the rest
GPU_SHARE = 0.25


def calibrate(
    merged: Model,
    *,
    base: Model,
    experts: Mapping[str, Model],
    batches: Mapping[str, Batches],
    settings: choose.CalibrationOrAuto = "auto",
    labels: Mapping[str, Tensor] | None = None,
    out: str | Path | None = None,
    plan: BlockPlan | None = None,
    token_weights: TokenRule | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    host_memory: int | None = None,
    work: str | Path | None = None,
    resume: bool = True,
    block_drift: bool = True,
    progress: Callable[[str], None] | None = None,
    _complete: Callable[[Path, Result], object] = lambda folder, result: None,
) -> Result:
    """Calibrate a merged model to its experts' features, block by block in forward order and in
    closed form (Algorithm 1).

    Models given as folders are streamed: only the current block is in memory, and the next expert's
    block is read ahead. Modules are not modified. Of a CLIP folder the vision tower is calibrated.

    Args:
        merged, base, experts: modules or checkpoint folders of one architecture.
        batches: per task an iterable of keyword mappings for the model's forward, such as
            {"pixel_values": x} (T5: {"input_ids": i, "attention_mask": m, "labels": l}).
        settings: λ, ρ, α and the switches of the method; `Calibration()` has the paper's for CLIP.
            Default: "auto" holds out a quarter of each task's samples (4 to 64), calibrates a few
            candidates on up to 32 of the others, and rejects those whose answers are worse than the
            merged model's on any task, beyond two paired standard errors. The one nearest to the
            experts' answers is calibrated on all other samples, and kept if it still passes. Up to
            42 samples of a task are all used for that and check nothing; with fewer than 8 the
            merged model is kept. What cannot be solved stays. `Result.choice` has the choice.
        labels: per task the vectors (K, d) of its classes' texts, for encoders without a head: the
            choice then compares the similarities f c / ‖f‖ of features f (d,) to them, else to the
            other samples. For a CLIP's vision tower, multiply them by its projection (p, d).
        out: folder to write instead of returning the model, in the merged folder's precision. Other
            files, such as the tokenizer, come from there, or from the base folder for a module.
        plan: the model's blocks. Default: looked up or inferred.
        token_weights: (module name, last block?, (batch, tokens)) -> weights of that shape.
            Default: the family's rule.
        device, dtype: of models given as folders. Default: those of `merged` if it is a module, else
            the CPU and float32. Batches are moved to the device.
        host_memory: cap on cached activations in RAM, in bytes; the rest goes to disk.
        work: scratch folder, with `out` also for solved blocks. Default: next to `out`.
        resume: continue from the blocks of an interrupted run with the same models and batches.
        block_drift: measure the drift after every block, with one more pass through the last one.
        progress: called with one line of text per block; the logger "featcal" gets the same lines.

    Returns: Result with model (None with `out`), folder (None without) and a record per block.
    Raises: FeatCalError; modules stay as they were given, and no folder is written.
    """
    ranks = current()
    root = Path(work or tempfile.gettempdir())
    scratch = root if out is None else scratch_folder(Path(out), root if work else None)
    # an empty folder was made by the user, and stays
    removes_root = work and (not root.is_dir() or (root.name and any(root.iterdir())))
    with ranks.fail_together(), ExitStack() as opened:
        check_tasks(experts, batches)
        auto, kind = settings == "auto", type(settings).__name__
        expected = 'must be "auto" or a featcal.Calibration'
        require(auto or isinstance(settings, Calibration), "settings", kind, expected)
        labels = {} if labels is None else labels
        choose.check_labels(labels, experts)
        expected = "is for the choice of settings; leave labels or settings out"
        require(auto or not labels, "labels", ", ".join(labels), expected)
        fits, expected = isinstance(host_memory, SupportsInt | None), "must be a number of bytes"
        require(fits, "calibrate.host_memory", host_memory, expected)
        if out is not None:
            require_apart("out", out, (merged, base, *experts.values()))
            require_replaceable(Path(out))
            fits = not root.is_file() and root.resolve() != Path(out).resolve()
            require(fits, "work", str(root), "must be another folder than out, and no file")
            if ranks.first:
                for path in filter(None, (out, work)):
                    opened.enter_context(claimed(path))
        my_experts = {task: experts[task] for task in ranks.mine(experts)}
        opened.enter_context(exact_products())
        models = open_models(
            merged, base, my_experts, plan, settings, whole=out is None, device=device, dtype=dtype
        )
        if token_weights is not None:
            stacks = (replace(stack, token_rule=token_weights) for stack in models.plan.stacks)
            models = replace(models, plan=BlockPlan(*stacks))
        opened.enter_context(models.evaluated())
        folder = None if out is None else opened.enter_context(RunFolder(scratch, ranks.first))
        spool = opened.enter_context(Spool(*budgets(models.device, host_memory), scratch))

        def report(records: list[BlockRecord], seconds: float, resumed: bool) -> None:
            first, *others = records
            parts = [first.name, counted(len(experts), "task")]
            if others:
                parts.append(f"{len(records)} candidates")
            elif first.relative_drift is not None:
                parts.append(f"drift {first.relative_drift:.3f}")
            if first.experts:
                fewest = counted(min(first.experts.values()), "token")
                parts.append(f"{counted(len(first.experts), 'expert')}, {fewest} or more")
            parts.append(f"{seconds:.1f} s")
            if resumed:
                parts.append("(solved before)")
            LOG.info(line := "  ".join(parts))
            if progress:
                progress(line)

        run = Run(models, spool, ranks, block_drift, resume, report=report)
        student, choice = Student(models.student, models.settings, folder), None
        if auto:
            parts = choose.split(batches, models, spool)
            if any(ranks.gathered({min(my_experts): parts is None}).values()):
                choice = choose.TOO_FEW
            else:
                few, many, unseen = ({t: p[i] for t, p in parts.items()} for i in range(3))
                if labels:  # refuses vectors of another width before the long computation
                    named = {t: p for t, p in unseen.items() if t in labels}
                    choose.divergences(models, {choose.MERGED: models.merged}, named, few, labels)
                choice, before_kl = best_candidate(run, folder, few, unseen, labels)
                batches = {**batches, **many}
            student.settings = choice.settings or models.settings
        try:
            if choice is None or choice.settings:
                sweep(run, [student], batches)
        except SingularGram:
            if choice is None:
                raise
            reason = f"with all samples {choice.chosen} has no finite solution"
            sentence = f"Kept the merged model: {reason}."
            choice = replace(choice, chosen=choose.MERGED, sentence=sentence, settings=None)
        if choice and choice.settings:
            # where samples are few, the last calibration has seen those that were held out
            unseen = {t: p for t, p in unseen.items() if not (p.chosen & many[t].chosen).any()}
            handles = {choose.FINAL: calibrated_handle(models, student)}
            final = ranks.gathered(choose.divergences(models, handles, unseen, few, labels))
            if final:  # the merged model stays if the last calibration fails the same test
                by_task = {task: before_kl[task] | final[task] for task in final}
                last = choose.choose(by_task, {choose.FINAL: choice.settings})
                shown = {name: d for name, d in last.divergence.items() if name == choose.FINAL}
                kept = last if last.chosen == choose.MERGED else choice
                choice = replace(kept, divergence={**choice.divergence, **shown})
        if choice and not choice.settings:
            student.blocks = []
            if isinstance(models.student, InMemoryModel):
                from_folder = not isinstance(merged, nn.Module)
                original = load_as_calibrated(merged) if from_folder else models.merged.module
                models.student.module.load_state_dict(original.state_dict())
        if choice and ranks.first:
            LOG.info(choice.sentence)

        used = choice.settings if choice else models.settings
        result = Result(models.student.module, None, student.blocks, used, choice)
        if out is None or folder is None:
            return result
        if ranks.first:
            text = json.dumps(result.stated, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
            with atomic_folder(out) as path:
                if isinstance(models.student, StreamedModel):
                    solved = folder.solved_values(models.plan) if used else lambda _: None
                    copy_with(models.student, path, solved)
                else:
                    save_model(models.student.module, path, getattr(models.base, "folder", None))
                (path / RECORD).write_text(text, encoding="utf-8")
                write_card(path, calibration_card(merged, base, experts, result))
                _complete(path, result)
    folder.remove()
    if removes_root and ranks.first and not any(root.iterdir()):
        root.rmdir()
    return replace(result, model=None, folder=Path(out))


def best_candidate(
    run: Run,
    folder: RunFolder | None,
    few: choose.Parts,
    unseen: choose.Parts,
    labels: Mapping[str, Tensor],
) -> tuple[choose.Choice, dict[str, dict[str, list[float]]]]:
    """Calibrate the candidates on few samples; return choice and merged model's divergence."""
    run, models, ranks = replace(run, block_drift=False), run.models, run.ranks
    with ExitStack() as opened:
        students = {}
        for number, (name, candidate) in enumerate(choose.CANDIDATES.items()):
            settings, solved = candidate.but(norm=models.settings.norm), None
            if folder:
                path = folder.path / f"candidate-{number}"
                solved = opened.enter_context(RunFolder(path, ranks.first))
            students[name] = Student(models.student_copy(), settings, solved)
        # experts of a mixture see the tokens that one student routes to them
        mixture = bool(packed_experts(models.student.module))
        groups = [[name] for name in students] if mixture else [list(students)]
        while groups:
            names = groups.pop(0)
            try:
                sweep_solvable(run, [students[name] for name in names], few)
            except SingularGram:  # one overflows: calibrate each alone, drop those that fail
                failed = {name: students.pop(name) for name in names}
                if len(failed) > 1:
                    for name, student in failed.items():
                        students[name] = replace(student, handle=models.student_copy(), blocks=[])
                        groups.append([name])
        handles = {name: calibrated_handle(models, student) for name, student in students.items()}
        handles = {choose.MERGED: models.merged} | handles
        by_task = ranks.gathered(choose.divergences(models, handles, unseen, few, labels))
    used = {name: student.settings for name, student in students.items()}
    choice = choose.choose(by_task, {**choose.CANDIDATES, **used})
    return choice, {task: {choose.MERGED: kl[choose.MERGED]} for task, kl in by_task.items()}


def sweep_solvable(run: Run, students: Sequence[Student], batches: TaskBatches) -> None:
    """Sweep without what this model does not allow: the residual target, or some linears."""
    while True:
        try:
            return sweep(run, students, batches)
        except BadSetting as error:
            if error.key != "calibrate.residual":  # nothing writes into the residual stream
                raise
            change: dict[str, Any] = {"residual": 0.0}
        except BadCapture as error:
            models, modules = run.models, students[0].settings.modules
            linears = check_blocks(models.student.module, models.plan, False, modules)
            bad = [f".{name}" for name in error.modules]
            left = [name for name in linears if not any(path.endswith(f".{name}") for path in bad)]
            if len(left) in (0, len(linears)):
                raise
            LOG.warning(f"{error.problem}; not calibrated")
            change = {"modules": left}
        for student in students:  # blocks before the one that raised are already changed
            student.handle, student.blocks = run.models.student_copy(), []
            student.settings = student.settings.but(**change)


def check(
    models: Models, batches: TaskBatches, auto: bool, labels: Mapping[str, Tensor] = {}
) -> None:
    """Check models and batches as `calibrate` does, on a few samples per task, without solving."""
    check_tasks(models.experts, batches)
    candidates = [models.settings, choose.STREAM.but(norm=models.settings.norm)][: 1 + auto]
    if auto and min(sum(map(sample_count, own)) for own in batches.values()) < choose.FEWEST:
        return  # the run keeps the merged model
    spool = Spool(*budgets(models.device, None), tempfile.gettempdir())
    with exact_products(), models.evaluated(), spool:
        samples = {}
        for task, expert in models.experts.items():
            handles, first = [models.student, expert], islice(batches[task], 1 + auto)
            samples[task] = [check_plan(models.plan, task, batch, handles) for batch in first]
        run = Run(models, spool, current(), block_drift=False, solve=False)
        for settings in candidates:
            (sweep_solvable if auto else sweep)(run, [Student(models.student, settings)], samples)
        if auto:
            choose.divergences(models, {choose.MERGED: models.merged}, samples, samples, labels)


def budgets(device: torch.device, host_memory: int | None) -> tuple[int, int]:
    """Return the bytes of features to keep on the device and in host memory."""
    on_gpu = int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE) if device.type == "cuda" else 0
    return on_gpu, sys.maxsize if host_memory is None else int(host_memory)


def calibrated_handle(models: Models, student: Student) -> ModelHandle:
    """Return a calibrated student; a streamed one reads its solved blocks from its folder."""
    in_memory = isinstance(student.handle, InMemoryModel)
    return student.handle if in_memory else models.student_copy(student.folder)
