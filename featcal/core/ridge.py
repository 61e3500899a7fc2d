"""Solve one linear: each task's normal equations, their sum over tasks, and the solution (Eqs.
10-17 and 51-55).

Legend: d inputs · o outputs · rows are tokens, so G = Σ w x xᵀ / n is (d, d) and weights are (o,
d). Linears fed by the same tensor (q, k, v) are one linear with their outputs side by side: one
Gram matrix, one factor. Matrices are large and used once, so each step takes its argument's memory
for its result, as its docstring says. Knows nothing of models, files or where the moments come
from.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from featcal.core.moments import Moments, mirror
from featcal.core.precision import SUM_DTYPE
from featcal.errors import SingularGram

EPS = 1e-8  # ε of Eq. 14: keeps ω finite where every feature is zero; never active on real data


@dataclass
class RidgeSystem:
    """Normal equations of one linear without λ and anchor; `+=` adds tasks and processes."""

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

    def __iadd__(self, other: "RidgeSystem") -> "RidgeSystem":
        for mine, theirs in zip(self.sums, other.sums, strict=True):
            mine += theirs
        return self

    @property
    def sums(self) -> tuple[Tensor, ...]:
        """Return everything that adds."""
        return self.left, self.right, self.x, self.y, self.scale


@dataclass(frozen=True)
class Solution:
    """A solved linear."""

    weight: Tensor  # (o, d)
    bias: Tensor  # (o,)
    conditioning: float  # a lower bound of the left side's condition number


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
) -> RidgeSystem:
    """Return one task's share of Eqs. 17 and 55.

    The target feature α x_exp + (1−α) x_cal (Eq. 10) is linear in both, so α enters once, after the
    sums over tokens: C_tgt = αC + (1−α)G, and μ_tgt = αμ_exp + (1−α)μ_cal likewise. Moments with a
    residual gap add αβ (r_exp − r_cal) to the target output.

    Args:    moments of the task, consumed: the system takes their memory; W (o, d) and b (o,) of
             its expert; alpha: α;
             task_weights: "gram" is ω of Eq. 14, which gives every task's Gram matrix unit
             Frobenius norm, "uniform" is ω = 1;
             affine: with "joint" the right side keeps the expert's bias, Σ ω (C Wᵀ + μ bᵀ), for
             `eliminate_bias`.
    Returns: the task's system; the zero system where the task has no tokens.
    """
    W, b = W.to(SUM_DTYPE), b.to(SUM_DTYPE)
    n = moments.weight
    if n == 0:
        return RidgeSystem.zero(W.shape[1], W.shape[0], W.device)
    mu_cal = moments.cal / n  # (d,)  Eq. 52
    mu_tgt = alpha * moments.exp / n + (1 - alpha) * mu_cal  # (d,)
    G = mirror(moments.G).div_(n)  # (d, d)  Eq. 13
    omega = 1 / G.norm().clamp_min(EPS) if task_weights == "gram" else torch.ones_like(n)  # Eq. 14
    C = moments.C.mul_(omega / n)  # (d, d), folded (d, o)  ωC
    G *= omega  # ωG
    if moments.folded:
        target = (
            C.addr_(omega * mu_cal, b, alpha=-1).mul_(alpha).addmm_(G, W.T, alpha=1 - alpha)
        )  # (d, o)
    else:
        target = C.mul_(alpha).add_(G, alpha=1 - alpha) @ W.T  # (d, o)
    y = W @ mu_tgt + b  # (o,)
    if moments.residual_gap is not None:
        y += alpha * moments.residual_gap / n
    if affine == "joint":
        target.addr_(omega * mu_cal, b)
    return RidgeSystem(G, target, omega * mu_cal, omega * y, omega)


def prior_system(W: Tensor, W_base: Tensor, kappa: float) -> RidgeSystem:
    """Return one task's share of κ Σ ‖(W − W_t) τᵀ‖²/‖τ‖² with τ = W_t − W_base, which no data enter: κP
    and κPW_tᵀ for P = τᵀτ/‖τ‖².

    At κ → ∞ the step from the base is Σ τP (Σ P)⁺ within the span of the task vectors: closed-form
    WUDI (Cheng et al., 2025), of linears that share their input on top of one another, as its
    official code takes q, k and v.

    Args:    W, W_base (o, d) of the expert and the base.
    Returns: the share, to be added to the task's; zeros where the expert has not moved.
    """
    W, tau = W.to(SUM_DTYPE), W.to(SUM_DTYPE) - W_base.to(SUM_DTYPE)
    share = RidgeSystem.zero(W.shape[1], len(W), W.device)
    size = tau.square().sum()
    if size > 0:
        share.left.addmm_(tau.T, tau, alpha=kappa / float(size))
        share.right += share.left @ W.T
    return share


def eliminate_bias(system: RidgeSystem, a: Tensor, ridge: float) -> RidgeSystem:
    """Eliminate the bias: `solve_ridge` of the returned system gives weight and bias at their joint
    minimum.

    With x̄ = Σ ωμ, ȳ, s = Σ ω, the bias at its minimum is b = (ȳ + λa − W x̄)/(s + λ), Eq. 55 as it
    is. Put into the equation of the weight, W (Σ ωG + λI) + b x̄ᵀ = Σ ω (C Wᵀ + μ bᵀ)ᵀ + λA, it
    takes x̄x̄ᵀ/(s + λ) off the left side: centred moments.

    Args:    system: of shares made with affine "joint", changed in place; a (o,): anchor of the
             bias.
    """
    total = system.scale + ridge
    system.left.addr_(system.x, system.x / total, alpha=-1)
    system.right.addr_(system.x, (system.y + ridge * a.to(SUM_DTYPE)) / total, alpha=-1)
    return system


def solve_ridge(
    system: RidgeSystem, A: Tensor, a: Tensor, ridge: float, *, site: str = "linear"
) -> Solution:
    """Solve for the weight nearest the experts' outputs, pulled to the anchor (Eq. 17), then for the
    bias (Eq. 55).

    Eq. 17 is W (Σ ωG + λI) = Σ ω W C + λA. With A (Σ ωG + λI) taken off both sides it is solved for
    the step away from the anchor, (W − A)(Σ ωG + λI) = Σ ω W C − A Σ ωG, which vanishes exactly
    where there are no data; Eq. 55 likewise. One Cholesky factorisation in float64. Each ωG has
    unit Frobenius norm, so the condition number is at most (T + λ)/λ for T
    tasks: 161 for CLIP (λ = 0.05, T = 8), 8e5 for T5 (λ = 1e-5). The paper's stabiliser εI is left
    out: λ > 0 does its work in float64, and at λ = 0.05 it would move the weight by 2e-7 of itself.

    Args:    system: summed over tasks, consumed: its left becomes the factor, its right the step.
             A (o, d), a (o,): anchors, Eqs. 11 and 51.  ridge: λ > 0.  site: for the error.
    Returns: weight (o, d), bias (o,), float64, contiguous.   Raises: SingularGram if the left side
    has no factor.
    """
    A, a = A.to(SUM_DTYPE), a.to(SUM_DTYPE)
    step = system.right.addmm_(system.left, A.T, alpha=-1)  # (d, o)  Σ ω C Wᵀ − Σ ωG Aᵀ
    system.left.diagonal().add_(ridge)  # (d, d)  Σ ωG + λI
    factor = cholesky(system.left)
    if factor is None:
        raise SingularGram(site, ridge, len(system.left))
    for L, upper in ((factor, False), (factor.mT, True)):  # L Lᵀ step = right side
        torch.linalg.solve_triangular(L, step, upper=upper, out=step)
    W = (
        A + step.T
    ).contiguous()  # (o, d); a column-major result would be transposed by whoever copies raw memory
    b = a + (system.y - W @ system.x - system.scale * a) / (system.scale + ridge)  # (o,)
    return Solution(W, b, conditioning(factor))


def cholesky(left: Tensor) -> Tensor | None:
    """Return L of left = L Lᵀ in the memory of `left` (d, d), or None if it does not exist."""
    factor = (
        left.mT
    )  # symmetric; LAPACK counts columns first, so that only this view is factorised without a copy
    failed = torch.linalg.cholesky_ex(
        factor, out=(factor, torch.empty((), dtype=torch.int32, device=left.device))
    ).info
    finite = factor.diagonal().isfinite().all()  # each diagonal entry is made of its whole row
    return factor if finite and not failed else None


def conditioning(factor: Tensor) -> float:
    """Return (largest / smallest diagonal entry)² of the Cholesky factor, a lower bound of the
    condition number.
    """
    diagonal = factor.diagonal()
    return float((diagonal.max() / diagonal.min()) ** 2)
