"""λ of one site or norm from its own data: each half of the samples is measured on the other.

The tokens of one sample are alike. Criteria that count tokens as independent, such as generalised
cross-validation or Ledoit–Wolf shrinkage, choose λ too small; halves of whole samples do not.

Legend: d inputs, one more where weight and bias are solved jointly · o outputs · A the anchor.
"""

from collections.abc import Callable, Sequence
from math import inf

import torch
from torch import Tensor

from featcal.core.norm import NormSystem, solve_norm
from featcal.core.precision import SUM_DTYPE
from featcal.core.ridge import RidgeSystem, cholesky

LOWEST, HIGHEST = -6.0, 2.0  # log₁₀ λ; a task's whole Gram matrix has norm 1
START, STEPS = -2.0, (1.0, 0.5, 0.25)
WELL_CONDITIONED = 1e-4  # λ from which float32 measures errors to 1 in 1,000 or better
PROJECTIONS = 128  # of the outputs, on which the error of a site with more is estimated


def ridge_by_halves(halves: Sequence[RidgeSystem], A: Tensor, a: Tensor, affine: str) -> float:
    """Choose λ of a linear by solving on each half of the samples and measuring on the other.

    With S_k = Σ ω G and Y_k = Σ ω W C over the samples of half k, and -k the other half,

        W_k(λ) = A + (Y₋ₖ − A S₋ₖ)(S₋ₖ + λI)⁻¹,    Δ_k = W_k(λ) − A,
        E(λ) = Σ_k [tr Δ_k S_k Δ_kᵀ − 2 tr Δ_k (Y_k − A S_k)ᵀ].

    E is the squared error of the W_k on unseen samples minus the anchor's, so E(∞) = 0. ω and n are
    those of the whole: S = S₁ + S₂ has twice a half's samples, and the same λ fits it. (With means
    in place of sums that is λ/2.) The weight at the end is A + (Y − AS)(S + λI)⁻¹.

    Example: S₁ = S₂ = I (2 × 2), A = 0, Y₁ = (1, c), Y₂ = (1, −c). The halves agree on the first
    input only. With u = 1/(1 + λ), E = 2(1 + c²)u² − 4(1 − c²)u is least at u = (1 − c²)/(1 + c²):
    c² = 1/3 gives λ = 1, and W = (2, 0)(2I + I)⁻¹ = (2/3, 0). From c² = 1 on, no λ helps.

    Each E costs two Cholesky factors, fewer operations than one eigendecomposition. log λ is found
    by pattern search. Above 128 outputs E is estimated on 128 random projections of them: all
    outputs share λ, so their sum is all that matters.

    Args:
        halves: systems of both halves, summed over tasks and left unchanged.
        A, a: anchors (o, d) and (o,).
        affine: "joint" solves weight and bias as one system, else the weight alone.

    Returns:
        λ, or infinity where no λ has an error below the anchor's: the anchor is to be kept.
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
                return inf
            step = torch.cholesky_solve(R, factor)  # (d, o)  Δᵀ
            total += float((step * (S_held_out @ step - 2 * R_held_out)).sum())
        return total

    return lowest(error)


def norm_ridge_by_halves(halves: Sequence[NormSystem], gain: Tensor, shift: Tensor | None) -> float:
    """Choose λ of a LayerNorm likewise: E(λ) is summed over its features' 2×2 systems.

    Args:
        halves: systems of both halves, summed over tasks.
        gain, shift: anchors (d,); shift is None for RMSNorm.

    Returns:
        λ, or infinity where the anchors are to be kept.
    """
    g, s = gain.to(SUM_DTYPE), 0.0 if shift is None else shift.to(SUM_DTYPE)

    def error(ridge: float) -> float:
        total = 0.0
        for half, held_out in (halves, halves[::-1]):
            new_gain, new_shift = solve_norm(half, gain, shift, ridge)
            dg, ds = new_gain - g, 0.0 if new_shift is None else new_shift - s  # (d,), (d,)
            r_gain = held_out.right_gain - held_out.zz * g - held_out.z * s
            r_shift = held_out.right_shift - held_out.z * g - held_out.tasks * s
            square = held_out.zz * dg**2 + 2 * held_out.z * dg * ds + held_out.tasks * ds**2
            total += float((square - 2 * dg * r_gain - 2 * ds * r_shift).sum())
        return total

    return lowest(error)


def lowest(error: Callable[[float], float]) -> float:
    """Return the λ of least error by pattern search over log₁₀ λ, or infinity if none is below 0.

    The error falls towards its minimum from both sides, so one lower neighbour is enough to move
    there. First comes the side whose farther neighbour was lower.
    """
    known: dict[float, float] = {}

    def at(log_ridge: float) -> float:
        if log_ridge not in known:
            inside = LOWEST <= log_ridge <= HIGHEST
            known[log_ridge] = error(10**log_ridge) if inside else inf
        return known[log_ridge]

    best = START
    for step in STEPS:
        moved = True
        while moved:
            sides = sorted((-step, step), key=lambda side: known.get(best + 2 * side, inf))
            lower = next((best + side for side in sides if at(best + side) < at(best)), None)
            moved = lower is not None
            best = best if lower is None else lower
    return 10**best if at(best) < 0 else inf
