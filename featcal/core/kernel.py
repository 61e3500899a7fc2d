"""One linear where all tasks together have fewer tokens than features: Eq. 17 by the small side of
its system (kernel form).

Let X (N, d) hold the rows √(ωw/n) x_cal of all tasks and E (N, o) the rows √(ωw/n) (W_t x_tgt − A
x_cal), what the anchor lacks. The step away from the anchor, S (XᵀX + λI) = EᵀX as in
`ridge.solve_ridge`, is then, by (XᵀX + λI) Xᵀ = Xᵀ (XXᵀ + λI),

    S = Eᵀ (XXᵀ + λI)⁻¹ X,

one factor of N tokens in the place of d features, and no product of d by d. It needs the tokens
themselves, of all tasks at once.
Legend: n tokens of a task, N of all tasks · d inputs · o outputs · w token weights. Knows nothing
of models, settings or files.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from featcal.core.moments import Rows, add_gram, mirror
from featcal.core.precision import SUM_DTYPE, product, wide
from featcal.core.ridge import EPS, Solution, cholesky
from featcal.errors import SingularGram


@dataclass
class KernelSystem:
    """What tasks add to one linear, each a row of its lists; `+=` adds tasks."""

    x: list[Tensor] = field(default_factory=list)  # (n, d)  x_cal
    gap: list[Tensor] = field(
        default_factory=list
    )  # (n, o)  W_t x_tgt − A x_cal, and α times the lag
    w: list[Tensor] = field(default_factory=list)  # (n,), float64
    shift: list[Tensor] = field(default_factory=list)  # (o,)  b_t − a, float64

    def __iadd__(self, other: "KernelSystem") -> "KernelSystem":
        for mine, theirs in (
            (self.x, other.x),
            (self.gap, other.gap),
            (self.w, other.w),
            (self.shift, other.shift),
        ):
            mine += theirs
        return self


def task_rows(rows: Rows, W: Tensor, b: Tensor, A: Tensor, a: Tensor, alpha: float) -> KernelSystem:
    """One task's share: what its expert's outputs at the target features (Eq. 10) have beyond the
    anchor's.

    W x_tgt − A x_cal = (W − A) x_cal + αW (x_exp − x_cal): what is small is formed before it is
    multiplied, so that products in float32 leave its relative error at that of float32.

    Args:    rows of the task, consumed; W (o, d), b (o,) of its expert; A (o, d), a (o,): anchors,
             Eqs. 11 and 51; alpha: α.
    Returns: the task's share; an empty one where it has no tokens.
    """
    w = torch.cat(rows.w).to(SUM_DTYPE)  # (n,)
    if not len(w):
        return KernelSystem()
    x, ahead = torch.cat(rows.x_cal), wide(torch.cat(rows.x_exp))  # (n, d), (n, d)
    rows.x_cal.clear()
    rows.x_exp.clear()
    ahead = ahead.sub_(wide(x)).mul_(alpha)  # (n, d)  α (x_exp − x_cal)
    W, dtype = W.to(SUM_DTYPE), ahead.dtype
    gap = product(x, (W - A).to(dtype).T).add_(product(ahead, W.to(dtype).T))  # (n, o)
    if rows.lag:
        gap.add_(torch.cat(rows.lag), alpha=alpha)
    return KernelSystem([x], [gap], [w], [b.to(SUM_DTYPE) - a])


def solve_kernel(
    system: KernelSystem,
    A: Tensor,
    a: Tensor,
    ridge: float,
    task_weights: str = "gram",
    affine: str = "separate",
    *,
    site: str,
) -> Solution:
    """Weight and bias of `solve_ridge`, or with affine "joint" of `joined` before it, from the
    tokens (Eqs. 14, 17 and 55).

    ‖G‖ = ‖X_t X_tᵀ‖/n gives ω of Eq. 14. The bias of Eq. 55 is a + (Σ ω (mean of the gap + b_t − a)
    − S x̄)/(Σ ω + λ), x̄ = Σ ωμ.
    Weight and bias at once are one weight of features with a 1 behind them, pulled to (A, a). The
    products with what λ divides,
    XXᵀ and the last one, are in float64: in float32 they would cost 4e-4 and 1e-5 of the step at λ
    = 1e-5.

    Args:    system: of all tasks, consumed. A (o, d), a (o,): anchors, in float64. ridge: λ > 0.
             task_weights, affine: as
             `task_system` takes them. site: for the error.
    Returns: weight (o, d), bias (o,), float64, contiguous.   Raises: SingularGram if the small side
    has no factor.
    """
    if not system.x:
        return Solution(A, a, 1.0)
    tokens = [len(w) for w in system.w]
    X = torch.cat([x.to(SUM_DTYPE) for x in system.x])  # (N, d)
    E = torch.cat([gap.to(SUM_DTYPE) for gap in system.gap])  # (N, o)
    system.x.clear()
    system.gap.clear()
    K = X.new_zeros(len(X), len(X))  # (N, N)
    add_gram(K, X.T)
    mirror(K)
    scale = torch.cat([(w / w.sum()).sqrt() for w in system.w])  # (N,)  √(w/n)
    K.mul_(scale).mul_(scale[:, None])
    ends = torch.tensor(tokens).cumsum(0).tolist()
    blocks = [
        K[end - n : end, end - n : end] for n, end in zip(tokens, ends, strict=True)
    ]  # each task's own (n, n)
    norms = [
        block.norm().clamp_min(EPS) if task_weights == "gram" else X.new_ones(())
        for block in blocks
    ]
    omega = 1 / torch.stack(norms)  # (T,)  Eq. 14
    root = omega.repeat_interleave(torch.tensor(tokens, device=omega.device)).sqrt()  # (N,)
    K.mul_(root).mul_(root[:, None])
    scale = scale.mul_(root)  # (N,)  √(ωw/n)
    E.mul_(scale[:, None])
    shift = torch.stack(system.shift)  # (T, o)
    if affine == "joint":
        E += scale[:, None] * shift.repeat_interleave(torch.tensor(tokens, device=shift.device), 0)
        K.addr_(scale, scale)
    K.diagonal().add_(ridge)
    factor = cholesky(K)
    if factor is None:
        raise SingularGram(site, ridge, X.shape[1])
    mean = scale @ E  # (o,)  Σ ωw/n gap
    for L, upper in ((factor, False), (factor.mT, True)):  # L Lᵀ Z = E
        torch.linalg.solve_triangular(L, E, upper=upper, out=E)
    x_mean = scale.square() @ X  # (d,)  Σ ωμ
    own = scale @ E  # (o,)
    step = E.mul_(scale[:, None]).T @ X  # (o, d)
    bias = (
        own if affine == "joint" else (mean + omega @ shift - step @ x_mean) / (omega.sum() + ridge)
    )
    # XᵀX has no more than N < d eigenvalues above 0, so that λ is the smallest one of the left side
    return Solution(step.add_(A), bias.add_(a), float(factor.diagonal().max() ** 2 / ridge))
