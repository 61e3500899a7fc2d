"""One linear: each task's normal equations, their sum over tasks, and the solution (Eqs. 10-17 and 51-55).

Legend: d inputs · o outputs · rows are tokens, so G = Σ w x xᵀ / n is (d, d) and weights are (o, d).
Linears fed by the same tensor (q, k, v) are one linear with their outputs side by side: one Gram matrix, one factor.
Knows nothing of models, files or where the moments come from.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from featcal.core.moments import Moments
from featcal.core.precision import SUM_DTYPE
from featcal.errors import SingularGram

EPS = 1e-8  # ε of Eq. 14: keeps ω finite where every feature is zero; never active on real data


@dataclass
class RidgeSystem:
    """Normal equations of one linear without λ and anchor; `+` adds tasks and processes."""

    left: Tensor  # (d, d)  Σ ω G
    right: Tensor  # (d, o)  Σ ω C Wᵀ, C after interpolation
    x: Tensor  # (d,)  Σ ω μ_cal
    y: Tensor  # (o,)  Σ ω (W μ_tgt + b)
    scale: Tensor  # ()  Σ ω

    @classmethod
    def zero(cls, d: int, o: int, device: torch.device | str = "cpu") -> "RidgeSystem":
        """The system of no tasks, whose solution is the anchor."""
        shapes: tuple[tuple[int, ...], ...] = ((d, d), (d, o), (d,), (o,), ())
        return cls(*(torch.zeros(shape, dtype=SUM_DTYPE, device=device) for shape in shapes))

    def __add__(self, other: "RidgeSystem") -> "RidgeSystem":
        return RidgeSystem(
            self.left + other.left, self.right + other.right, self.x + other.x, self.y + other.y, self.scale + other.scale
        )


@dataclass(frozen=True)
class Solution:
    """A solved linear."""

    weight: Tensor  # (o, d)
    bias: Tensor  # (o,)
    conditioning: float  # a lower bound of the left side's condition number


def anchor(merged: Tensor, base: Tensor, rho: float) -> Tensor:
    """What the ridge pulls to: ρ·merged + (1−ρ)·base (Eqs. 11 and 51), in float64."""
    return rho * merged.to(SUM_DTYPE) + (1 - rho) * base.to(SUM_DTYPE)


def task_system(moments: Moments, W: Tensor, b: Tensor, alpha: float, task_weights: str = "gram") -> RidgeSystem:
    """One task's share of Eqs. 17 and 55.

    The target feature α x_exp + (1−α) x_cal (Eq. 10) is linear in both, so α enters once, after the sums over tokens:
    C_tgt = αC + (1−α)G, and μ_tgt = αμ_exp + (1−α)μ_cal likewise.

    Args:    moments of the task; W (o, d) and b (o,) of its expert; alpha: α; task_weights: "gram" is ω of Eq. 14, which
             gives every task's Gram matrix unit Frobenius norm, "uniform" is ω = 1.
    Returns: the task's system; the zero system where the task has no tokens.
    """
    W, b = W.to(SUM_DTYPE), b.to(SUM_DTYPE)
    n = moments.weight
    if n == 0:
        return RidgeSystem.zero(W.shape[1], W.shape[0], W.device)
    G, C = moments.G / n, moments.C / n  # Eq. 13
    omega = 1 / G.norm().clamp_min(EPS) if task_weights == "gram" else torch.ones_like(n)  # Eq. 14
    if moments.folded:
        target = alpha * C + (1 - alpha) * (G @ W.T)  # (d, o)
    else:
        target = (alpha * C + (1 - alpha) * G) @ W.T  # (d, o)
    mu_cal = moments.cal / n  # (d,)  Eq. 52
    mu_tgt = alpha * moments.exp / n + (1 - alpha) * mu_cal  # (d,)
    return RidgeSystem(omega * G, omega * target, omega * mu_cal, omega * (W @ mu_tgt + b), omega)


def solve_ridge(system: RidgeSystem, A: Tensor, a: Tensor, ridge: float, *, site: str = "linear") -> Solution:
    """Weight nearest the experts' outputs, pulled to the anchor (Eq. 17), then the bias with that weight (Eq. 55).

    Eq. 17 is W (Σ ωG + λI) = Σ ω W C + λA. With A (Σ ωG + λI) taken off both sides it is solved for the step away from the
    anchor, (W − A)(Σ ωG + λI) = Σ ω W C − A Σ ωG, which vanishes exactly where there are no data; Eq. 55 likewise. One
    Cholesky factorisation in float64. Each ωG has unit Frobenius norm, so the condition number is at most (T + λ)/λ for T
    tasks: 161 for CLIP (λ = 0.05, T = 8), 8e5 for T5 (λ = 1e-5). The paper's stabiliser εI is left out: λ > 0 does its work
    in float64, and at λ = 0.05 it would move the weight by 2e-7 of itself.

    Args:    system: summed over tasks.  A (o, d), a (o,): anchors, Eqs. 11 and 51.  ridge: λ > 0.  site: for the error.
    Returns: weight (o, d), bias (o,), float64, contiguous.   Raises: SingularGram if the left side has no factor.
    """
    A, a = A.to(SUM_DTYPE), a.to(SUM_DTYPE)
    left = system.left.clone()
    left.diagonal().add_(ridge)  # (d, d)  Σ ωG + λI
    factor, failed = torch.linalg.cholesky_ex(left)
    if failed or not factor.isfinite().all():
        raise SingularGram(site, ridge, left.shape[0])
    step = torch.cholesky_solve(system.right - system.left @ A.T, factor)  # (d, o)
    W = (A + step.T).contiguous()  # (o, d); a column-major result would be transposed by whoever copies raw memory
    b = a + (system.y - W @ system.x - system.scale * a) / (system.scale + ridge)  # (o,)
    return Solution(W, b, conditioning(factor))


def conditioning(factor: Tensor) -> float:
    """(largest / smallest diagonal entry)² of the Cholesky factor: a lower bound of the condition number, for free."""
    diagonal = factor.diagonal()
    return float((diagonal.max() / diagonal.min()) ** 2)
