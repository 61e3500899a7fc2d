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
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from featcal.calibration.block import Student, add_task_systems, solve_systems, student_blocks
from featcal.calibration.choose import Scores, kl_and_top1
from featcal.calibration.features import (
    Models,
    StudentTeacherFeatures,
    advance_student,
    encoder_outputs,
    features_by_task,
)
from featcal.calibration.observe import BlockSpec, Systems, observe
from featcal.calibration.ranks import Ranks
from featcal.core.precision import SUM_DTYPE, wide
from featcal.core.ridge import RidgeSystem, anchor
from featcal.errors import NotFinite, SingularGram
from featcal.models.batch import (
    Head,
    Model,
    TaskBatches,
    naming,
    output_embeddings,
    rows_before_head,
    unit_length,
)
from featcal.models.load import evaluation_mode
from featcal.models.modules import side_by_side
from featcal.models.plan import BlockPlan
from featcal.models.streamed import in_turn
from featcal.settings import OFF, Calibration
from reproduction.field.walk import opened

# First, last and step. log₁₀ λ goes from where a Cholesky factor still exists in float64 to where
# the anchor alone is left, log₂(1 + ρ) from the base (0) to fifteen times the merged change (4).
LOWEST, HIGHEST, STEP = LOG_RIDGE = (-6.0, 1.0, 0.25)
GRIDS = {"log_ridge": LOG_RIDGE, "log_blend": (0.0, 4.0, 0.1), "interpolation": (0.0, 1.0, 0.05)}
RANDOM_TRIALS = 6  # before the sampler draws conclusions from earlier trials
ATTEMPTS = 20  # to propose settings that were not tried
RIDGES = tuple(10 ** (LOWEST + STEP * n) for n in range(round((HIGHEST - LOWEST) / STEP) + 1))
Gains = dict[str, Tensor]  # by site, for every λ of RIDGES
Trial = tuple[Calibration, float]  # settings and their divergence


def proposal(
    seed: int, number: int, start: Calibration, path_ridge: float, trials: Sequence[Trial]
) -> Calibration:
    """Return the settings of a trial: the start, λ of the path, or TPE's (Bergstra et al., 2011)."""
    import optuna

    if number == 0:
        return start
    if number == 1:
        return rounded(start, path_ridge, start.anchor_blend, start.interpolation)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    uniform = optuna.distributions.FloatDistribution
    space = {n: uniform(low, high, step=step) for n, (low, high, step) in GRIDS.items()}
    settings = start
    for attempt in range(ATTEMPTS):
        draw = np.random.SeedSequence([seed, number, attempt, crc32(b"tune")]).generate_state(1)[0]
        sampler = optuna.samplers.TPESampler(seed=int(draw), n_startup_trials=RANDOM_TRIALS)
        study = optuna.create_study(sampler=sampler)
        for tried, far in trials:
            point = {"params": grid_point(tried), "distributions": space, "value": far}
            study.add_trial(optuna.trial.create_trial(**point))
        params = study.ask(space).params
        log_ridge, log_blend, interpolation = (params[name] for name in GRIDS)
        settings = rounded(start, 10**log_ridge, 2**log_blend - 1, interpolation)
        if settings not in [tried for tried, _ in trials]:
            break
    return settings


def rounded(settings: Calibration, ridge: float, blend: float, interpolation: float) -> Calibration:
    """Return the settings with λ, ρ and α in as many digits as one would type."""
    short = {"ridge": float(f"{ridge:.2g}"), "anchor_blend": round(blend, 2)}
    return settings.but(**short, interpolation=round(interpolation, 4))


def grid_point(settings: Calibration) -> dict[str, float]:
    """Return the nearest point of the search space; the start need not lie on its grid."""
    log_blend = math.log2(1 + max(settings.anchor_blend, 0))
    values, point = (math.log10(settings.ridge), log_blend, settings.interpolation), {}
    for value, (name, (low, high, step)) in zip(values, GRIDS.items(), strict=True):
        point[name] = min(max(low + round((value - low) / step) * step, low), high)
    return point


def divergence(ours: Tensor, theirs: Tensor, head: Any, models: Sequence[nn.Module] = ()) -> Tensor:
    """Return KL(expert ‖ model) of rows of features, (n,), by unit class vectors times the logit
    scale (K, p), or by the models' own language heads.
    """
    if head is None:
        return kl_and_top1(*map(Scores, (ours, theirs), map(output_embeddings, models)))[0]
    scores = (Scores(unit_length(wide(rows)) @ head.to(rows.device).T) for rows in (ours, theirs))
    return kl_and_top1(*scores)[0]


def distance(
    model: nn.Module,
    experts: Mapping[str, nn.Module],
    held_out: TaskBatches,
    head: Head,
    heads: Mapping[str, Tensor] | None,
) -> float:
    """Return the divergence of a model from its experts, the mean over tasks. Raises: NotFinite."""
    means = []
    for task, expert in sorted(experts.items()):
        total, count = torch.zeros((), dtype=SUM_DTYPE), 0
        with evaluation_mode([model, expert]):
            for number, batch in enumerate(held_out[task]):
                with naming(task, number):
                    both = [rows_before_head(one, batch, head)[0] for one in (model, expert)]
                rows = divergence(*both, heads and heads[task], (model, expert))
                total += rows.sum(dtype=SUM_DTYPE).cpu()
                count += len(rows)
        if not torch.isfinite(total):
            raise NotFinite(f"model, task {task}", "its answers")
        means.append(float(total) / count)
    return sum(means) / len(means)


def ridge_of(gains: Gains) -> float:
    """Return the λ with the largest sum of gain(λ) / largest gain, or the largest λ."""
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
    """Return every site's gains at every λ; blocks are solved on `kept`, gains of `held_out`."""
    settings = settings.but(order="forward", **OFF)
    with opened(merged, base, experts, settings, device, plan) as (models, spool):
        encoded: tuple[Mapping[str, StudentTeacherFeatures], ...] = ({}, {})
        gains: Gains = {}
        handles, students = [models.student], [Student(models.student, settings)]
        for source, stack in models.plan.in_order:
            pairs = zip((kept, held_out), encoded, strict=True)
            ends = (models, handles, stack)
            parts = [features_by_task(*ends, own, spool, source, other) for own, other in pairs]
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
        W, W_base = (side_by_side(map(b.get_submodule, site))[0] for b in (block, base))
        label = f"{spec.name}.{'+'.join(site)}"
        A = anchor(W, W_base, spec.settings.anchor_blend)
        gains[label] = site_gains(system, A, others.sites[site][0], label)
    solve_systems(ours, block, base, spec, Ranks())
    for task in models.experts:
        advance_student(block, spec.stack, kept[task])
        advance_student(block, spec.stack, held_out[task])
    return gains


def site_gains(system: RidgeSystem, A: Tensor, held_out: RidgeSystem, site: str) -> Tensor:
    """Return how much closer to the experts W(λ) is than the anchor on held-out samples, (n,).

    With J(W) = Σ ω/n ‖W X_cal − W_exp X_tgt‖², the data term of Eq. 12, the gain is J(A) − J(W(λ)).
    For f = 1/(S + λ), B = Uᵀ (Σ ω C Wᵀ − Σ ωG Aᵀ), and the held-out samples' left side L and right
    side r of the step in the basis U, it is 2 Σ_j f_j (B rᵀ)_jj − fᵀ (L ∘ B Bᵀ) f.

    Raises: SingularGram for a left side with NaN or infinity, which has no eigenvalues.
    """
    A = A.to(SUM_DTYPE)
    if not torch.isfinite(system.left).all():
        raise SingularGram(site, 0.0, len(system.left))
    values, vectors = torch.linalg.eigh(system.left)
    values = values.clamp_min(0)  # below 0 only by rounding
    step = vectors.T @ (system.right - system.left @ A.T)  # (d, o)  B
    right = vectors.T @ (held_out.right - held_out.left @ A.T)  # (d, o)  r
    left = vectors.T @ held_out.left @ vectors  # (d, d)  L
    linear, square = (step * right).sum(1), left * (step @ step.T)  # (d,), (d, d)
    lam = torch.tensor(RIDGES, dtype=SUM_DTYPE, device=values.device)[:, None]  # (n, 1)
    f = 1 / (values + lam)  # (n, d)
    return 2 * f @ linear - ((f @ square) * f).sum(1)
