"""The public function `tune`: λ, ρ and α of FeatCal, chosen without labels.

A trial's divergence from the experts on held-out samples is

    D = 1/T Σ_t 1/n_t Σ_r KL(p_r^t ‖ p_r),    p = softmax(z).

z_r are the scores of row r. A text has one row for every token (of the decoder, if there is one),
with z over the vocabulary; an image has one row, z = H_t f/‖f‖ by the head of its task. Images
without a head use 1 − cos(f_r, f_r^t) of the features instead of KL.

Legend: T tasks · n_t rows of task t · K scores · p width of a feature
"""

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from featcal.calibration.answers import Scores, kl_and_top1
from featcal.calibration.block import add_task_systems, solve_systems
from featcal.calibration.calibrate import budgets, calibrate
from featcal.calibration.features import (
    EncoderOutputs,
    Spool,
    StudentTeacherFeatures,
    advance_student,
)
from featcal.calibration.models import Models, open_models
from featcal.calibration.observe import BlockSpec, Systems, observe
from featcal.calibration.ranks import Ranks, current
from featcal.calibration.sweep import Student, encoder_outputs, features_by_task, student_blocks
from featcal.core.moments import TokenRule
from featcal.core.path import ridge_path
from featcal.core.precision import SUM_DTYPE, exact_products, wide
from featcal.core.ridge import anchor
from featcal.errors import NotFinite
from featcal.models.batch import Batches, Model, TaskBatches, check_tasks, naming
from featcal.models.features import Head, output_embeddings, rows_before_head
from featcal.models.load import evaluation_mode, load_as_calibrated
from featcal.models.modules import side_by_side
from featcal.models.plan import BlockPlan
from featcal.models.streamed import in_turn
from featcal.settings import OFF, Calibration, require
from featcal.tuning.search import (
    LOG_RIDGE,
    Candidate,
    Search,
    Trials,
    Tuned,
    best,
    imported,
    mark_of,
    proposals,
    rounds,
    split_all,
)

DEFAULT = Search()
LOWEST, HIGHEST, STEP = LOG_RIDGE
RIDGES = tuple(10 ** (LOWEST + STEP * n) for n in range(round((HIGHEST - LOWEST) / STEP) + 1))
Gains = dict[str, Tensor]  # by site, for every λ of RIDGES


def tune(
    merged: Model,
    *,
    base: Model,
    experts: Mapping[str, Model],
    batches: TaskBatches,
    settings: Calibration,
    head: Head = None,
    heads: Mapping[str, Tensor] | None = None,
    trials: int = DEFAULT.trials,
    holdout: float = DEFAULT.holdout,
    seed: int = DEFAULT.seed,
    plan: BlockPlan | None = None,
    token_weights: TokenRule | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    host_memory: int | None = None,
    work: str | Path | None = None,
    kept_in: str | Path | None = None,
    resume: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Tuned:
    """Choose λ, ρ and α by calibrating with a share of the samples and comparing answers on the
    rest; no label is used.

    Every trial is a whole calibration in forward order. Its score is D = 1/T Σ_t 1/n_t Σ_r
    KL(p_r^t ‖ p_r) over the held-out rows r of task t: p^t are the expert's answers, p the
    calibrated model's. The first trial is `settings`, the second the same with the λ that gains
    most along the regularisation path of every site; optuna's TPE sampler proposes the others.

    Args:
        merged, base, experts, plan, token_weights, device, dtype, host_memory, work: as for
            `calibrate`.
        batches: as for `calibrate`; all are read before the first trial and stay in memory.
        settings: where the search begins; settings other than λ, ρ and α stay as they are here.
        head: for CLIP, the weight (p, h) of visual_projection. Text needs none.
        heads: for CLIP, by task, the logit scale times the unit vectors of the classes (K, p).
            Without it, features are compared instead of answers.
        trials: number of calibrations.
        holdout: share of each task's samples that is held out, between 0 and 1.
        seed: of the held-out samples and the proposals.
        kept_in: a JSON file with the finished trials. Default: none.
        resume: go on from the trials in that file.
        progress: called with one line of text per trial, and for the path.

    Returns: Tuned: the settings with the smallest divergence, and every candidate.
    Raises: as `calibrate`; BadSetting; BadEnvironment without the extra `tune`.
    """
    search = Search(trials=trials, holdout=holdout, seed=seed)
    kind = type(settings).__name__
    require(isinstance(settings, Calibration), "settings", kind, "must be a featcal.Calibration")
    check_tasks(experts, batches)
    one_process = "must run in one process; start it without torchrun"
    require(current().world == 1, "tune", current().world, one_process)
    for task in experts if heads is not None else ():
        given, expected = sorted(heads or {}), f"must hold one for every task; {task} has none"
        require(task in given, "heads", given, expected)
    imported()  # before anything is computed
    in_memory = {task: list(own) for task, own in batches.items()}
    kept, held_out = split_all(in_memory, holdout, seed)
    roles = {"merged": merged, "base": base}
    roles |= {f"expert {task}": expert for task, expert in experts.items()}
    options: dict[str, Any] = {"plan": plan, "token_weights": token_weights, "device": device}
    options |= {"dtype": dtype, "host_memory": host_memory, "work": work}
    head_text = head if isinstance(head, Tensor) else repr(head)
    marked = (head_text, repr(plan and plan.stacks), repr(token_weights), settings, search, dtype)
    marked_heads = [part for pair in sorted((heads or {}).items()) for part in pair]
    mark = mark_of(roles, in_memory, *marked, *marked_heads)
    state = Trials.opened(Path(kept_in) if kept_in else None, mark, resume)
    report = progress or (lambda text: None)
    if state.path_ridge is None:
        gains = path_gains(merged, base, experts, kept, held_out, settings, **options)
        state.add(path_ridge=ridge_of(gains))
        report(f"path of every site: λ {state.path_ridge:.2g}")
    assert state.path_ridge is not None
    for numbers in rounds(search):
        known = [one for one in state.in_order if one.number < numbers[0]]
        for proposal in proposals(search, numbers, settings, state.path_ridge, known):
            if proposal.number not in state.finished:
                models: dict[str, Any] = {"base": base, "experts": experts, "batches": kept}
                model = calibrate(merged, **models, settings=proposal.settings, **options).model
                assert model is not None
                divergence = distances(model, experts, held_out, head, heads)
                state.add(Candidate(**vars(proposal), divergence=divergence))
            one = state.finished[proposal.number]
            s = one.settings
            values = f"λ {s.ridge:.2g}  ρ {s.anchor_blend:g}  α {s.interpolation:g}"
            trial = f"trial {one.number + 1} of {trials}"
            report(f"{trial}  {values}  divergence {one.mean:.4f}")
    return Tuned(best(state.in_order).settings, state.in_order)


def distances(
    model: nn.Module,
    experts: Mapping[str, Model],
    held_out: TaskBatches,
    head: Head = None,
    heads: Mapping[str, Tensor] | None = None,
) -> dict[str, float]:
    """Return the divergence of one model from every expert, by task; one expert given as a folder
    is in memory at a time.

    Experts answer again for every model: keeping all scores over a vocabulary would take gigabytes.
    """
    weight = next(model.parameters())
    divergence = {}
    for task in sorted(experts):
        expert = experts[task]
        if not isinstance(expert, nn.Module):
            loaded: nn.Module = load_as_calibrated(expert, weight.dtype)
            expert = loaded.to(weight.device)
        own = heads[task] if heads else None
        divergence[task] = task_divergence(task, model, expert, held_out[task], head, own)
    return divergence


def task_divergence(
    task: str,
    model: nn.Module,
    expert: nn.Module,
    batches: Batches,
    head: Head = None,
    scores: Tensor | None = None,
) -> float:
    """Return the mean divergence over the rows of one task.

    head:   for CLIP, the weight (p, h) of visual_projection or a function.
    scores: for images, H_t (K, p): the logit scale times the unit vectors of the classes.
    Raises: NotFinite for a model whose outputs are NaN; BadBatches.
    """
    total = torch.zeros((), dtype=SUM_DTYPE)
    count = 0
    model, expert = comparable(model, expert)
    with evaluation_mode([model, expert]):
        for number, batch in enumerate(batches):
            with naming(task, number):
                ours, theirs = (rows_before_head(one, batch, head)[0] for one in (model, expert))
            theirs = theirs.to(ours.device)
            language_heads = [output_embeddings(one) for one in (model, expert)]
            if scores is not None:
                rows, _ = kl_and_top1(Scores(ours, weight=scores), Scores(theirs, weight=scores))
            elif language_heads[0] is not None:
                rows, _ = kl_and_top1(*map(Scores, (ours, theirs), language_heads))
            else:
                rows = 1 - cosine_similarity(wide(ours), wide(theirs), dim=-1)  # (rows,)
            total += rows.sum(dtype=SUM_DTYPE).cpu()
            count += len(rows)
    if not torch.isfinite(total):
        raise NotFinite(f"model, task {task}", "its answers")
    return float(total) / count


def comparable(model: nn.Module, expert: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return both models, or their towers where the heads have different classes or vocabularies,
    or one has none.
    """
    types = {type(one) for one in (model, expert)}
    sizes = {getattr(output_embeddings(one), "out_features", None) for one in (model, expert)}
    if len(types) == len(sizes) == 1 and not type(expert).__name__.endswith("Classification"):
        return model, expert
    return getattr(model, "base_model", model), getattr(expert, "base_model", expert)


def ridge_of(gains: Gains) -> float:
    """Return the λ with the largest sum over sites of gain(λ) / largest gain.

    Sites without any gain are left out. If no site gains anything, the anchor is best everywhere:
    return the largest λ.
    """
    shares = [gain / gain.max() for gain in gains.values() if gain.max() > 0]
    return RIDGES[int(torch.stack(shares).sum(0).argmax())] if shares else RIDGES[-1]


def path_gains(
    merged: Model,
    base: Model,
    experts: Mapping[str, Model],
    kept: TaskBatches,
    held_out: TaskBatches,
    settings: Calibration,
    *,
    plan: BlockPlan | None = None,
    token_weights: TokenRule | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    host_memory: int | None = None,
    work: str | Path | None = None,
) -> Gains:
    """Return the gains of every site at every λ of RIDGES, during a calibration with `settings` in
    forward order.

    Blocks are solved on `kept`, gains measured on `held_out`. Settings beyond the paper are off:
    the λ is only a candidate, which is then calibrated with all settings. Raises: as `calibrate`.
    """
    settings = settings.but(order="forward", **OFF)
    with ExitStack() as contexts:
        models = open_models(
            merged, base, experts, plan, settings, whole=True, device=device, dtype=dtype
        )
        contexts.enter_context(models.evaluated())
        contexts.enter_context(exact_products())
        limits = budgets(models.device, host_memory)
        spool = contexts.enter_context(Spool(*limits, Path(work or tempfile.gettempdir())))
        encoded: tuple[dict[str, EncoderOutputs], ...] = ({}, {})
        gains: Gains = {}
        handles, students = [models.student], [Student(models.student, settings)]
        for source, stack in models.plan.in_order:
            parts = [
                features_by_task(models, handles, stack, batches, spool, source, encoder)
                for batches, encoder in zip((kept, held_out), encoded, strict=True)
            ]
            of_blocks = student_blocks(models, students, stack, source, token_weights)
            for path, [(block, spec)] in of_blocks:
                with models.base.block(path) as base:
                    gains |= block_gains(models, path, block, base, spec, *parts)
            encoded = tuple(encoder_outputs(models, handles, stack, part) for part in parts)
        return gains


def block_gains(
    models: Models,
    path: str,
    block: nn.Module,
    base: nn.Module,
    spec: BlockSpec,
    kept: Mapping[str, StudentTeacherFeatures],
    held_out: Mapping[str, StudentTeacherFeatures],
) -> Gains:
    """Return the gains of one block, then solve it and move both parts of the samples past it."""
    gains, ours, others = Gains(), Systems(), Systems()
    for task, teacher in in_turn(models.experts, path):
        for systems, features in ((ours, kept), (others, held_out)):
            [moments] = observe([block], teacher, features[task], [spec])
            add_task_systems(systems, moments, teacher, spec.settings)
    for site, [system] in ours.sites.items():  # the block still has the merged weights
        W, W_base = (
            side_by_side(module.get_submodule(linear) for linear in site)[0]
            for module in (block, base)
        )
        label = f"{spec.name}.{'+'.join(site)}"
        path_of_site = ridge_path(system, anchor(W, W_base, spec.settings.anchor_blend), site=label)
        gains[label] = path_of_site.gains(others.sites[site][0], RIDGES)
    solve_systems(ours, block, base, spec, Ranks())
    for task in models.experts:
        advance_student(block, spec.stack, kept[task])
        advance_student(block, spec.stack, held_out[task])
    return gains
