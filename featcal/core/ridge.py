"""Solve one linear: each task's normal equations, their sum over tasks, and the solution
(Eqs. 10-17 and 51-55).

Legend: d inputs · o outputs · rows are tokens, so G = Σ w x xᵀ / n is (d, d); weights are (o, d).
Linears fed by the same tensor (q, k, v) are one linear with stacked outputs: one Gram matrix, one
factor. Matrices are large and used once, so steps may write results into their arguments' memory.

λ can be chosen by halves of the samples: the tokens of one sample are alike, so criteria that count
tokens as independent, such as generalised cross-validation or Ledoit–Wolf shrinkage, choose it too
small; halves of whole samples do not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, nan

import torch
from torch import Tensor

from featcal.core.moments import Moments, mirror
from featcal.core.precision import SUM_DTYPE
from featcal.errors import SingularGram

EPS = 1e-8  # ε of Eq. 14: keeps ω finite if all features are zero; never active on real data
LOWEST, HIGHEST = -6.0, 2.0  # log₁₀ λ; a task's whole Gram matrix has norm 1
START, STEPS = -2.0, (1.0, 0.5, 0.25)
WELL_CONDITIONED = 1e-4  # λ from which float32 measures errors to 1 in 1,000 or better
PROJECTIONS = 128  # of the outputs, on which the error of a site with more is estimated


@dataclass
class RidgeSystem:
    """Normal equations of one linear without λ and anchor; `+=` adds tasks."""

    left: Tensor  # (d, d)  Σ ω G
    right: Tensor  # (d, o)  Σ ω C Wᵀ, C after interpolation
    x: Tensor  # (d,)  Σ ω μ_cal
    y: Tensor  # (o,)  Σ ω (W μ_tgt + b)
    scale: Tensor  # ()  Σ ω

    @classmethod
    def zero(cls, d: int, o: int, device: torch.device | str = "cpu") -> "RidgeSystem":
        """Return the system of no tasks, whose solution is the anchor."""
        shapes: tuple[tuple[int, ...], ...] = ((d, d), (d, o), (d,), (o,), ())
        return cls(*(torch.zeros(shape, dtype=SUM_DTYPE, device=device) for shape in shapes))

    def __iadd__(self, other: "RidgeSystem") -> "RidgeSystem":
        for total, term in zip(vars(self).values(), vars(other).values(), strict=True):
            total += term
        return self


@dataclass(frozen=True)
class Solution:
    """A solved linear."""

    weight: Tensor  # (o, d)
    bias: Tensor  # (o,)
    conditioning: float  # lower bound of the left side's condition number


def anchor(merged: Tensor, base: Tensor, rho: float) -> Tensor:
    """Return ρ·merged + (1−ρ)·base, to which the ridge pulls (Eqs. 11 and 51), in float64."""
    return ((1 - rho) * base.to(SUM_DTYPE)).add_(merged.to(SUM_DTYPE), alpha=rho)


def task_system(
    moments: Moments,
    W: Tensor,
    b: Tensor,
    alpha: float,
    task_weights: str = "gram",
    affine: str = "separate",
    whole: tuple[Tensor, Tensor] | None = None,
) -> RidgeSystem:
    """Return one task's share of Eqs. 17 and 55, zero without tokens.

    The target feature α x_exp + (1−α) x_cal (Eq. 10) is linear in both, so α enters once, after the
    sums over tokens: C_tgt = αC + (1−α)G, and μ_tgt = αμ_exp + (1−α)μ_cal likewise. Moments with a
    residual gap add αβ (r_exp − r_cal) to the target output.

    Args:
        moments: of the task, consumed: the system takes their memory.
        W, b, alpha: weight (o, d) and bias (o,) of the task's expert; α.
        task_weights: "gram" is ω of Eq. 14, which gives every task's Gram matrix unit Frobenius
            norm; "uniform" is ω = 1.
        affine: with "joint" the right side keeps the expert's bias, Σ ω (C Wᵀ + μ bᵀ), for
            `eliminate_bias`.
        whole: n and ω of the task, if `moments` cover only some of its samples.
    """
    W, b = W.to(SUM_DTYPE), b.to(SUM_DTYPE)
    n, omega = whole or (moments.weight, None)
    if n == 0:
        return RidgeSystem.zero(W.shape[1], W.shape[0], W.device)
    mu_cal = moments.cal / n  # (d,)  Eq. 52
    mu_tgt = alpha * moments.exp / n + (1 - alpha) * mu_cal  # (d,)
    G = mirror(moments.G)
    if omega is None:  # Eq. 14
        omega = 1 / (G.norm() / n).clamp_min(EPS) if task_weights == "gram" else torch.ones_like(n)
    share = moments.weight / n  # (), 1 for the whole
    G *= omega / n  # (d, d)  ωG, Eq. 13
    C = moments.C.mul_(omega / n)  # (d, d), folded (d, o)  ωC
    if moments.blended:
        target = C
    elif moments.folded:
        C.addr_(omega * mu_cal, b, alpha=-1)  # ωC Wᵀ
        target = C.mul_(alpha).addmm_(G, W.T, alpha=1 - alpha)  # (d, o)
    else:
        target = C.mul_(alpha).add_(G, alpha=1 - alpha) @ W.T  # (d, o)
    y = W @ mu_tgt + share * b  # (o,)
    if moments.folded:
        y += alpha * moments.gap / n
    if affine == "joint":
        target.addr_(omega * mu_cal, b)
    return RidgeSystem(G, target, omega * mu_cal, omega * y, share * omega)


def task_halves(
    halves: Sequence[Moments], W: Tensor, b: Tensor, alpha: float, task_weights: str, affine: str
) -> list[RidgeSystem]:
    """Return `task_system` of all samples of a task, or of each half with n and ω of the whole."""
    if len(halves) == 1:
        return [task_system(halves[0], W, b, alpha, task_weights, affine)]
    n = halves[0].weight + halves[1].weight
    size = (mirror(halves[0].G + halves[1].G) / n).norm().clamp_min(EPS)  # NaN without tokens
    omega = 1 / size if task_weights == "gram" else torch.ones_like(n)
    return [task_system(half, W, b, alpha, task_weights, affine, (n, omega)) for half in halves]


def eliminate_bias(system: RidgeSystem, a: Tensor, ridge: float) -> RidgeSystem:
    """Eliminate the bias, so that `solve_ridge` gives weight and bias at their joint minimum.

    With x̄ = Σ ωμ, ȳ, s = Σ ω, the bias at its minimum is b = (ȳ + λa − W x̄)/(s + λ), as in Eq. 55.
    Inserted into the weight's equation W (Σ ωG + λI) + b x̄ᵀ = Σ ω (C Wᵀ + μ bᵀ)ᵀ + λA, it
    subtracts x̄x̄ᵀ/(s + λ) from the left side: the moments become centred. The system, a sum of
    shares made with affine "joint", is changed in place; a (o,) is the anchor of the bias.
    """
    total = system.scale + ridge
    system.left.addr_(system.x, system.x / total, alpha=-1)
    system.right.addr_(system.x, (system.y + ridge * a.to(SUM_DTYPE)) / total, alpha=-1)
    return system


def solve_ridge(
    system: RidgeSystem, A: Tensor, a: Tensor, ridge: float, *, site: str = "linear"
) -> Solution:
    """Solve for the weight nearest the experts' outputs, pulled to the anchor, then for the bias
    (Eqs. 17 and 55); without data both are the anchors.

    Eq. 17 is W (Σ ωG + λI) = Σ ω W C + λA: one Cholesky factorisation in float64. Each ωG has unit
    Frobenius norm, so the condition number is at most (T + λ)/λ for T tasks: 161 for CLIP
    (λ = 0.05, T = 8), 8e5 for T5 (λ = 1e-5). The paper's stabiliser εI is left out: in float64
    λ > 0 is enough, and at λ = 0.05 εI would change the weight by 2e-7, relative.

    Args:
        system: summed over tasks, consumed: its left becomes the factor, its right the weight.
        A, a: anchors (o, d) and (o,), Eqs. 11 and 51.
        ridge: λ > 0; infinity keeps the anchors.
        site: its name in the error.

    Returns: weight (o, d) and bias (o,), float64, contiguous.
    Raises: SingularGram if the left side has no Cholesky factor, or the right side is not finite.
    """
    A, a = A.to(SUM_DTYPE), a.to(SUM_DTYPE)
    diagonal = system.left.diagonal()
    if ridge == inf or not diagonal.any():
        return Solution(A.contiguous(), a, 1.0)
    diagonal += ridge  # Σ ωG + λI
    weight = system.right.add_(A.T, alpha=ridge)  # (d, o)  Σ ω C Wᵀ + λAᵀ
    factor = cholesky(system.left)
    if factor is None or not weight.sum().isfinite():
        raise SingularGram(site, ridge, len(system.left))
    for L, upper in ((factor, False), (factor.mT, True)):  # L Lᵀ Wᵀ = right side
        torch.linalg.solve_triangular(L, weight, upper=upper, out=weight)
    # column-major memory would reach other processes transposed, as gloo copies it raw
    W = weight.T.contiguous()  # (o, d)
    b = a + (system.y - W @ system.x - system.scale * a) / (system.scale + ridge)  # (o,)
    return Solution(W, b, float((factor.diagonal().max() / factor.diagonal().min()) ** 2))


def cholesky(left: Tensor) -> Tensor | None:
    """Return L of left = L Lᵀ in the memory of `left` (d, d), or None if it does not exist."""
    factor = left.mT  # left is symmetric; only its column-major view is factorised without a copy
    info = torch.empty((), dtype=torch.int32, device=left.device)
    failed = torch.linalg.cholesky_ex(factor, out=(factor, info)).info
    finite = factor.diagonal().isfinite().all()  # each diagonal entry depends on its whole row
    return factor if finite and not failed else None


def ridge_by_halves(halves: Sequence[RidgeSystem], A: Tensor, a: Tensor, affine: str) -> float:
    """Choose λ of a linear by solving on each half of the samples and measuring on the other.

    With S_k = Σ ω G and Y_k = Σ ω W C over the samples of half k, and -k the other half,

        W_k(λ) = A + (Y₋ₖ − A S₋ₖ)(S₋ₖ + λI)⁻¹,    Δ_k = W_k(λ) − A,
        E(λ) = Σ_k [tr Δ_k S_k Δ_kᵀ − 2 tr Δ_k (Y_k − A S_k)ᵀ].

    E is the squared error of the W_k on unseen samples minus the anchor's, so E(∞) = 0. ω and n are
    those of the whole: S = S₁ + S₂ has twice a half's samples, and the same λ fits it. (With means
    in place of sums that is λ/2.) The weight at the end is A + (Y − AS)(S + λI)⁻¹.

    Each E costs two Cholesky factors, fewer operations than one eigendecomposition. Above 128
    outputs E is estimated on 128 random projections of them: only their sum matters for λ.

    Args:
        halves: systems of both halves, summed over tasks and left unchanged.
        A, a: anchors (o, d) and (o,).
        affine: "joint" solves weight and bias as one system, else the weight alone.

    Returns: λ, or infinity where no λ has an error below that of the anchor, which is then kept.
    """
    A = torch.cat([A, a[:, None]], 1) if affine == "joint" else A  # (o, d)
    o = len(A)
    P = torch.eye(o, dtype=SUM_DTYPE, device=A.device)
    if o > PROJECTIONS:
        signs = torch.randint(2, (o, PROJECTIONS), generator=torch.Generator().manual_seed(o))
        P = (2.0 * signs.to(P) - 1) / PROJECTIONS**0.5  # (o, 128), the mean of P Pᵀ is I
    parts = []
    for half in halves:
        S, Y = half.left, half.right  # (d, d), (d, o)
        if affine == "joint":
            column = torch.cat([half.x, half.scale[None]])[:, None]  # (d, 1)
            S = torch.cat([torch.cat([S, half.x[None]]), column], 1)
            Y = torch.cat([Y, half.y[None]])
        parts.append((S, Y @ P - S @ (A.T @ P)))  # (d, d), (d, o or 128)

    narrow = [(S.float(), R.float()) for S, R in parts]

    def error(ridge: float) -> float:
        total, precise = 0.0, parts if ridge < WELL_CONDITIONED else narrow
        for (S, R), (S_held_out, R_held_out) in (precise, precise[::-1]):
            left = S.clone()
            left.diagonal().add_(ridge)
            factor = cholesky(left)
            if factor is None:
                return inf if S.diagonal().isfinite().all() else nan
            step = torch.cholesky_solve(R, factor)  # (d, o)  Δᵀ
            total += float((step * (S_held_out @ step - 2 * R_held_out)).sum())
        return total

    return lowest(error)


def lowest(error: Callable[[float], float]) -> float:
    """Return the λ of least error by pattern search over log₁₀ λ, or infinity if none is below 0.

    The error mostly falls towards its minimum from both sides, so one lower neighbour is enough to
    move there. The side whose farther neighbour was lower is tried first.
    """
    known: dict[float, float] = {}

    def at(log_ridge: float) -> float:
        if log_ridge not in known:
            known[log_ridge] = error(10**log_ridge) if LOWEST <= log_ridge <= HIGHEST else inf
        return known[log_ridge]

    best = START
    for step in STEPS:
        lower: float | None = best
        while lower is not None:
            best = lower
            sides = sorted((-step, step), key=lambda side: known.get(best + 2 * side, inf))
            lower = next((best + side for side in sides if at(best + side) < at(best)), None)
    return inf if at(best) >= 0 else 10**best  # NaN is for `solve_ridge` to report
