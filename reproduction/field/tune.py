"""The search for λ, ρ and α without labels that the study of the default compares with.

TPE (optuna) proposes settings. A trial calibrates on a share of the samples; its divergence from
the experts on the rest is

    D = 1/T Σ_t 1/n_t Σ_r KL(p_r^t ‖ p_r),    p = softmax(z).

z_r are the scores of row r. A text has one row for every token (of the decoder, if there is one),
with z over the vocabulary; an image has one row, z = H_t f/‖f‖ by the head of its task.

The second trial's λ comes from the path of every site. With Σ ωG = U S Uᵀ and R = Σ ω C Wᵀ − Σ ωG
Aᵀ, Eq. 17 for the step away from the anchor is W(λ)ᵀ = Aᵀ + U (S + λI)⁻¹ Uᵀ R.

Legend: T tasks · n_t rows of task t · K scores · p width of a feature · d inputs · o outputs
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from featcal.calibration.block import (
    Student,
    add_task_systems,
    solve_systems,
    student_blocks,
)
from featcal.calibration.calibrate import budgets
from featcal.calibration.choose import Scores, kl_and_top1
from featcal.calibration.features import (
    Spool,
    StudentTeacherFeatures,
    advance_student,
)
from featcal.calibration.models import Models, encoder_outputs, features_by_task, open_models
from featcal.calibration.observe import BlockSpec, Systems, observe
from featcal.calibration.ranks import Ranks
from featcal.core.precision import SUM_DTYPE, exact_products, wide
from featcal.core.ridge import RidgeSystem, anchor
from featcal.errors import NotFinite, SingularGram
from featcal.evaluation.accuracy import unit_length
from featcal.models.batch import (
    Batches,
    Head,
    Model,
    TaskBatches,
    naming,
    output_embeddings,
    rows_before_head,
)
from featcal.models.load import evaluation_mode, load_as_calibrated
from featcal.models.modules import side_by_side
from featcal.models.plan import BlockPlan
from featcal.models.streamed import in_turn
from featcal.settings import OFF, Calibration

Origin = Literal["start", "path", "search"]

# First, last and step. log₁₀ λ goes from where a Cholesky factor still exists in float64 to where
# the anchor alone is left; log₂(1 + ρ) from the base (0) to fifteen times the merged change (4),
# where ratios matter more than differences. All values that the paper uses and sweeps lie inside.
LOG_RIDGE = (-6.0, 1.0, 0.25)
LOG_BLEND = (0.0, 4.0, 0.1)
INTERPOLATION = (0.0, 1.0, 0.05)
GRIDS = {"log_ridge": LOG_RIDGE, "log_blend": LOG_BLEND, "interpolation": INTERPOLATION}
RANDOM_TRIALS = 6  # before the sampler draws conclusions from earlier trials
ATTEMPTS = 20  # to propose settings that were not tried


LOWEST, HIGHEST, STEP = LOG_RIDGE
RIDGES = tuple(10 ** (LOWEST + STEP * n) for n in range(round((HIGHEST - LOWEST) / STEP) + 1))
Gains = dict[str, Tensor]  # by site, for every λ of RIDGES


@dataclass(frozen=True)
class Proposal:
    """Settings to try. origin: the start, the λ of the regularisation path, or the sampler."""

    number: int
    origin: Origin
    settings: Calibration


@dataclass(frozen=True)
class Candidate(Proposal):
    """Settings that were tried. divergence: by task, from the expert on the held-out samples;
    smaller is better.
    """

    divergence: Mapping[str, float]

    @property
    def mean(self) -> float:
        """Return the mean over tasks."""
        return sum(self.divergence.values()) / len(self.divergence)


def proposal(
    seed: int, number: int, start: Calibration, path_ridge: float, known: list[Candidate]
) -> Proposal:
    """Return one trial: the start, then λ of the regularisation path, then the sampler's.

    start: settings other than λ, ρ and α stay as there.   known: all earlier trials.
    """
    if number == 0:
        return Proposal(0, "start", start)
    if number == 1:
        settings = rounded(start, path_ridge, start.anchor_blend, start.interpolation)
        return Proposal(1, "path", settings)
    tried = {one.settings for one in known}
    return Proposal(number, "search", sampled(seed, number, start, known, tried))


def sampled(
    seed: int, number: int, start: Calibration, known: list[Candidate], tried: set[Calibration]
) -> Calibration:
    """Return one proposal of the sampler (TPE; Bergstra et al., 2011): random in early trials, then
    where trials were good.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space = {
        name: optuna.distributions.FloatDistribution(low, high, step=step)
        for name, (low, high, step) in GRIDS.items()
    }
    settings = start
    for attempt in range(ATTEMPTS):
        draw = np.random.SeedSequence([seed, number, attempt, crc32(b"tune")]).generate_state(1)[0]
        sampler = optuna.samplers.TPESampler(seed=int(draw), n_startup_trials=RANDOM_TRIALS)
        study = optuna.create_study(sampler=sampler)
        for one in known:
            trial = optuna.trial.create_trial(
                params=grid_point(one.settings), distributions=space, value=one.mean
            )
            study.add_trial(trial)
        params = study.ask(space).params
        log_ridge, log_blend, interpolation = (params[name] for name in GRIDS)
        settings = rounded(start, 10**log_ridge, 2**log_blend - 1, interpolation)
        if settings not in tried:
            break
    return settings


def rounded(settings: Calibration, ridge: float, blend: float, interpolation: float) -> Calibration:
    """Return the settings with λ, ρ and α in as many digits as one would type."""
    return settings.but(
        ridge=float(f"{ridge:.2g}"),
        anchor_blend=round(blend, 2),
        interpolation=round(interpolation, 4),
    )


def grid_point(settings: Calibration) -> dict[str, float]:
    """Return the nearest point of the search space; the start need not lie on its grid."""
    values = {
        "log_ridge": math.log10(settings.ridge),
        "log_blend": math.log2(1 + max(settings.anchor_blend, 0)),
        "interpolation": settings.interpolation,
    }
    return {
        name: min(max(low + round((values[name] - low) / step) * step, low), high)
        for name, (low, high, step) in GRIDS.items()
    }


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
                both = (Scores(unit_length(wide(x)) @ scores.T) for x in (ours, theirs))
                rows, _ = kl_and_top1(*both)
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
    plan: BlockPlan | None,
    device: torch.device,
) -> Gains:
    """Return the gains of every site at every λ of RIDGES, during a calibration with `settings` in
    forward order.

    Blocks are solved on `kept`, gains measured on `held_out`. Settings beyond the paper are off:
    the λ is only a candidate, which is then calibrated with all settings.
    """
    settings = settings.but(order="forward", **OFF)
    with ExitStack() as contexts:
        models = open_models(
            merged, base, experts, plan, settings, whole=True, device=device, dtype=None
        )
        contexts.enter_context(models.evaluated())
        contexts.enter_context(exact_products())
        spool = Spool(*budgets(models.device, None), tempfile.gettempdir())
        contexts.enter_context(spool)
        encoded: tuple[Mapping[str, StudentTeacherFeatures], ...] = ({}, {})
        gains: Gains = {}
        handles, students = [models.student], [Student(models.student, settings)]
        for source, stack in models.plan.in_order:
            parts = [
                features_by_task(models, handles, stack, batches, spool, source, encoder)
                for batches, encoder in zip((kept, held_out), encoded, strict=True)
            ]
            for path, [(block, spec)] in student_blocks(models, students, stack, source):
                with models.base.block(path) as base_block:
                    gains |= block_gains(models, path, block, base_block, spec, *parts)
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
            moments = observe([block], teacher, features[task], {0: spec})[0]
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


@dataclass(frozen=True)
class RidgePath:
    """One linear's weight at every λ."""

    values: Tensor  # (d,)  S, ascending, none below 0
    vectors: Tensor  # (d, d)  U
    step: Tensor  # (d, o)  Uᵀ (Σ ω C Wᵀ − Σ ωG Aᵀ)
    anchor: Tensor  # (o, d)  A

    def weight(self, ridge: float) -> Tensor:
        """Return W(λ), (o, d), the weight that `solve_ridge` gives."""
        step = self.vectors @ (self.step / (self.values + ridge)[:, None])  # (d, o)
        return (self.anchor + step.T).contiguous()

    def gains(self, held_out: RidgeSystem, ridges: Sequence[float]) -> Tensor:
        """Return how much closer to the experts W(λ) is than the anchor on held-out samples.

        With J(W) = Σ ω/n ‖W X_cal − W_exp X_tgt‖², the data term of Eq. 12, the gain is
        J(A) − J(W(λ)). For f = 1/(S + λ), B = `step`, and the held-out samples' left side L and
        right side r of the step in the basis U, it is 2 Σ_j f_j (B rᵀ)_jj − fᵀ (L ∘ B Bᵀ) f.

        Args:
            held_out: system of the held-out samples, left unchanged.
            ridges: n values of λ.

        Returns:
            The gains (n,), float64.
        """
        right = self.vectors.T @ (held_out.right - held_out.left @ self.anchor.T)  # (d, o)  r
        left = self.vectors.T @ held_out.left @ self.vectors  # (d, d)  L
        # (d,), (d, d)
        linear, square = ((self.step * right).sum(1), left * (self.step @ self.step.T))
        lam = torch.tensor(ridges, dtype=SUM_DTYPE, device=self.values.device)[:, None]  # (n, 1)
        f = 1 / (self.values + lam)  # (n, d)
        return 2 * f @ linear - ((f @ square) * f).sum(1)


def ridge_path(system: RidgeSystem, A: Tensor, *, site: str = "linear") -> RidgePath:
    """Return the path of a system.

    Args:
        system: summed over tasks, left unchanged.
        A: anchor (o, d), Eq. 11.
        site: its name in the error.

    Raises:
        SingularGram: the left side holds NaN or infinity, so it has no eigenvalues.
    """
    A = A.to(SUM_DTYPE)
    if not torch.isfinite(system.left).all():
        raise SingularGram(site, 0.0, len(system.left))
    values, vectors = torch.linalg.eigh(system.left)
    step = vectors.T @ (system.right - system.left @ A.T)
    return RidgePath(values.clamp_min(0), vectors, step, A)  # below 0 only by rounding
