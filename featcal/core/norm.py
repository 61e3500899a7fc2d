"""Scale and shift of a LayerNorm, feature by feature (Eqs. 56-59); RMSNorm has no shift.

Only the student's normalised features z enter: one affine map is fitted to the experts' affine maps
evaluated on z.
Legend: n tokens · d features · w token weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

import torch
from torch import Tensor

from featcal.core.precision import SUM_DTYPE
from featcal.core.ridge import EPS, lowest


@dataclass
class NormMoments:
    """Sums over the tokens of one task (Eq. 56, before the division by n)."""

    z: Tensor  # (d,)  Σ w z
    zz: Tensor  # (d,)  Σ w z²
    weight: Tensor  # ()  Σ w

    @classmethod
    def zero(cls, d: int, device: torch.device | str = "cpu") -> "NormMoments":
        """Return the moments of no tokens."""
        z = torch.zeros(d, dtype=SUM_DTYPE, device=device)
        return cls(z, z.clone(), torch.zeros((), dtype=SUM_DTYPE, device=device))

    def add(self, z: Tensor, w: Tensor) -> None:
        """Add n tokens: z (n, d), normalised without scale and shift, and their weights w (n,)."""
        self.z += w @ z
        self.zz += w @ (z * z)
        self.weight += w.sum(dtype=SUM_DTYPE)


@dataclass
class NormSystem:
    """Per feature, the 2×2 normal equations without λ and anchor (Eq. 58); `+` adds tasks."""

    zz: Tensor  # (d,)  Σ q
    z: Tensor  # (d,)  Σ z̄
    right_gain: Tensor  # (d,)  Σ (q γ + z̄ β)
    right_shift: Tensor  # (d,)  Σ (z̄ γ + β)
    tasks: float  # N

    @classmethod
    def zero(cls, d: int, device: torch.device | str = "cpu") -> "NormSystem":
        """Return the system of no tasks, whose solution is the anchor."""
        zz, z, gain, shift = torch.zeros(4, d, dtype=SUM_DTYPE, device=device)
        return cls(zz, z, gain, shift, 0.0)

    def __add__(self, other: "NormSystem") -> "NormSystem":
        return NormSystem(*map(add, vars(self).values(), vars(other).values()))


def norm_system(
    moments: NormMoments, gain: Tensor, shift: Tensor | None, whole: Tensor | None = None
) -> NormSystem:
    """Return one task's share of Eq. 58; every task has weight 1, there is no ω.

    Args:
        moments: of the task.
        gain, shift: γ and β (d,) of its expert; shift is None for RMSNorm.
        whole: n of the task, where `moments` are of a part of its samples.

    Returns: the task's system, zero if the task has no tokens.
    """
    n = moments.weight if whole is None else whole
    if n == 0:
        return NormSystem.zero(len(gain), gain.device)
    gain = gain.to(SUM_DTYPE)
    shift = torch.zeros_like(gain) if shift is None else shift.to(SUM_DTYPE)
    z, q, share = moments.z / n, moments.zz / n, float(moments.weight / n)  # (d,), (d,)  Eq. 56
    return NormSystem(q, z, q * gain + z * shift, z * gain + share * shift, share)


def solve_norm(
    system: NormSystem, gain: Tensor, shift: Tensor | None, ridge: float
) -> tuple[Tensor, Tensor | None]:
    """Solve for scale and shift nearest the experts' affine maps, pulled to the anchors (Eq. 59).

    It is solved for the step away from the anchors, which is exactly zero without data.

    Args:
        system: summed over tasks.
        gain, shift: anchors (d,); shift is None for RMSNorm.
        ridge: λ > 0.

    Returns: γ* (d,) and β* (d,) or None, float64.
    """
    gain = gain.to(SUM_DTYPE)
    a11, a12, a22 = system.zz + ridge, system.z, system.tasks + ridge  # Eq. 58
    if shift is None:
        return gain + (system.right_gain - system.zz * gain) / a11, None
    shift = shift.to(SUM_DTYPE)
    r_gain = system.right_gain - system.zz * gain - system.z * shift  # (d,)
    r_shift = system.right_shift - system.z * gain - system.tasks * shift  # (d,)
    D = (a22 * a11 - a12 * a12).clamp_min(EPS)  # (d,)
    return gain + (a22 * r_gain - a12 * r_shift) / D, shift + (a11 * r_shift - a12 * r_gain) / D


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
