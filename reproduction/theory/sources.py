"""Proposition 8 and Eq. 45: what it costs to solve a linear on features that the finished model
does not give it.

Legend: N tokens of a task · d inputs · o outputs · u a linear's input (N, d) · y its target (N, o)
· W (o, d) · A the anchor. The objective is that of Eq. 47 as printed: tasks unweighted, no bias,
every token alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from featcal.core.moments import Moments
from featcal.core.ridge import solve_ridge, task_system
from featcal.settings import Calibration


@dataclass(frozen=True)
class Source:
    """Where one linear's inputs are taken from: by task, its input and the target that follows from
    it (Eq. 10).
    """

    u: dict[str, Tensor]
    y: dict[str, Tensor]


@dataclass(frozen=True)
class Linear:
    """One linear of the experts, and the features that reach it there."""

    weights: dict[str, Tensor]  # W_i (o, d) by task
    x: dict[str, Tensor]  # x_exp (N, d) by task
    anchor: Tensor  # (o, d), Eq. 11

    def source(self, u: Mapping[str, Tensor], alpha: float) -> Source:
        """Inputs with their targets W_i (α x_exp + (1 − α) u)."""
        return Source(
            dict(u),
            {t: (alpha * self.x[t] + (1 - alpha) * u[t]) @ W.T for t, W in self.weights.items()},
        )


def loss(W: Tensor, source: Source) -> float:
    """Σ over tasks of the mean of ‖W u − y‖² over tokens: Eq. 47 without its last term, which every
    source shares.
    """
    return sum(
        float(((u @ W.T - source.y[task]) ** 2).sum(1).mean()) for task, u in source.u.items()
    )


def relative_loss(W: Tensor, source: Source) -> float:
    """‖W u − y‖ / ‖y‖ over all tasks and tokens."""
    off = sum(float(((u @ W.T - source.y[task]) ** 2).sum()) for task, u in source.u.items())
    return (off / sum(float((y**2).sum()) for y in source.y.values())) ** 0.5


def objective(W: Tensor, source: Source, linear: Linear, ridge: float) -> float:
    """J(W) of Eq. 47."""
    return loss(W, source) + ridge * float(((W - linear.anchor) ** 2).sum())


def minimum(source: Source, linear: Linear, settings: Calibration) -> Tensor:
    """W* of Eq. 47, by the solver that calibration uses."""
    total = None
    for task, u in source.u.items():
        moments = Moments.zero(u.shape[1], device=u.device)
        moments.add(u, linear.x[task], torch.ones(len(u), dtype=u.dtype, device=u.device))
        W = linear.weights[task]
        share = task_system(moments, W, W.new_zeros(len(W)), settings.interpolation, "uniform")
        if total is None:
            total = share
        else:
            total += share
    assert total is not None
    return solve_ridge(
        total, linear.anchor, linear.anchor.new_zeros(len(linear.anchor)), settings.ridge
    ).weight


@dataclass(frozen=True)
class Mismatch:
    """Proposition 8 for one linear, on the weights between the two minima (which are also the
    minima on that segment).
    """

    gap: float  # J_dep(W_src) − J_dep(W_dep), at least 0
    best: float  # J_dep(W_dep)
    largest: float  # the right side of Eq. 48
    transport: float  # the right side of Eq. 49


def mismatch(src: Source, dep: Source, linear: Linear, settings: Calibration) -> Mismatch:
    """Both sides of Eqs. 48 and 49.

    The supremum over all matrices is infinite unless the sources agree, so a class has to be
    chosen; the proof needs no more than the two minima. On the segment between them J_dep − J_src
    is a parabola, whose largest size is known exactly.
    """
    W_src, W_dep = minimum(src, linear, settings), minimum(dep, linear, settings)
    at = [loss(W, dep) - loss(W, src) for W in (W_src, (W_src + W_dep) / 2, W_dep)]
    sides = (
        objective(W_src, dep, linear, settings.ridge),
        objective(W_dep, dep, linear, settings.ridge),
    )
    slope = steepness(src, dep, (W_src, W_dep))
    moved = sum(wasserstein(src, dep, task) for task in src.u)
    return Mismatch(sides[0] - sides[1], sides[1], 2 * peak(*at), 2 * slope * moved)


def peak(start: float, middle: float, end: float) -> float:
    """The largest |value| on [0, 1] of the parabola through three even places."""
    curve, slope = 2 * (start + end) - 4 * middle, 4 * middle - 3 * start - end
    values = [abs(start), abs(end)]
    if curve and 0 < -slope / (2 * curve) < 1:
        values.append(abs(start - slope**2 / (4 * curve)))
    return max(values)


def steepness(src: Source, dep: Source, ends: tuple[Tensor, Tensor]) -> float:
    """K of Eq. 49: 2 max ‖W u − y‖ √(1 + ‖W‖²), over both supports; convex in W, so the ends of the
    segment decide.
    """
    farthest = max(
        float((u @ W.T - source.y[task]).norm(dim=1).max())
        for W in ends
        for source in (src, dep)
        for task, u in source.u.items()
    )
    widest = max(float(torch.linalg.matrix_norm(W, 2)) for W in ends)
    return 2 * farthest * (1 + widest**2) ** 0.5


def wasserstein(src: Source, dep: Source, task: str) -> float:
    """The 1-Wasserstein distance of the pairs (u, y) of one task, exact: tokens are matched one to
    one at the least cost.
    """
    from scipy.optimize import linear_sum_assignment

    ours, theirs = (torch.cat([s.u[task], s.y[task]], dim=1) for s in (src, dep))
    cost = torch.cdist(ours, theirs, compute_mode="donot_use_mm_for_euclid_dist").cpu().numpy()
    rows, columns = linear_sum_assignment(cost)
    return float(cost[rows, columns].mean())
