"""Scale and shift of a LayerNorm, feature by feature (Eqs. 56-59); RMSNorm has no shift.

Only the student's normalised features z enter: one affine map is fitted to the experts' on z.
Legend: n tokens · d features · w token weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from featcal.core.precision import SUM_DTYPE
from featcal.core.ridge import EPS, lowest

# (5, d): per feature, the 2×2 normal equations without λ and anchor (Eq. 58), which add over tasks:
# Σ q, Σ z̄, Σ (q γ + z̄ β), Σ (z̄ γ + β), N
NormSystem = Tensor


def norm_sums(z: Tensor, w: Tensor) -> Tensor:
    """Return Σ w z, Σ w z² and Σ w over n tokens of one task (Eq. 56, before the division by n).

    z (n, d), normalised without scale and shift; w (n,).   Returns: (3, d), which adds over batches.
    """
    rows = w @ z, w @ (z * z), w.sum(dtype=SUM_DTYPE).expand(z.shape[1])
    return torch.stack([row.to(SUM_DTYPE) for row in rows])


def norm_system(sums: Tensor, gain: Tensor, shift: Tensor | None, n: Tensor) -> NormSystem:
    """Return one task's share of Eq. 58, zero without tokens; every task has weight 1, no ω.

    sums: of `norm_sums`, (3, d).
    gain, shift: γ and β (d,) of the task's expert; shift is None for RMSNorm.
    n: Σ w of all its samples, of which `sums` may cover only some.
    """
    if n == 0:
        return torch.zeros(5, len(gain), dtype=SUM_DTYPE, device=gain.device)
    gain = gain.to(SUM_DTYPE)
    shift = torch.zeros_like(gain) if shift is None else shift.to(SUM_DTYPE)
    z, q, share = sums / n  # (d,), (d,), (d,)  Eq. 56
    return torch.stack([q, z, q * gain + z * shift, z * gain + share * shift, share])


def solve_norm(
    system: NormSystem, gain: Tensor, shift: Tensor | None, ridge: float
) -> tuple[Tensor, Tensor | None]:
    """Solve for scale and shift nearest the experts' affine maps, pulled to the anchors (Eq. 59).

    The unknown is the step from the anchors, which is exactly zero without data.
    system: summed over tasks.   gain, shift: anchors (d,); shift is None for RMSNorm.
    Returns: γ* (d,) and β* (d,) or None, float64.
    """
    gain = gain.to(SUM_DTYPE)
    q, a12, right_gain, right_shift, tasks = system
    a11, a22 = q + ridge, tasks + ridge  # Eq. 58
    if shift is None:
        return gain + (right_gain - q * gain) / a11, None
    shift = shift.to(SUM_DTYPE)
    r_gain = right_gain - q * gain - a12 * shift  # (d,)
    r_shift = right_shift - a12 * gain - tasks * shift  # (d,)
    D = (a22 * a11 - a12 * a12).clamp_min(EPS)  # (d,)
    return gain + (a22 * r_gain - a12 * r_shift) / D, shift + (a11 * r_shift - a12 * r_gain) / D


def norm_ridge_by_halves(halves: Sequence[NormSystem], gain: Tensor, shift: Tensor | None) -> float:
    """Choose λ of a norm as `ridge_by_halves` does, with E summed over features' 2×2 systems."""
    g, s = gain.to(SUM_DTYPE), 0.0 if shift is None else shift.to(SUM_DTYPE)

    def error(ridge: float) -> float:
        total = 0.0
        for half, held_out in (halves, halves[::-1]):
            new_gain, new_shift = solve_norm(half, gain, shift, ridge)
            dg, ds = new_gain - g, 0.0 if new_shift is None else new_shift - s  # (d,), (d,)
            q, z, right_gain, right_shift, tasks = held_out
            r_gain = right_gain - q * g - z * s
            r_shift = right_shift - z * g - tasks * s
            square = q * dg**2 + 2 * z * dg * ds + tasks * ds**2
            total += float((square - 2 * dg * r_gain - 2 * ds * r_shift).sum())
        return total

    return lowest(error)
