"""Proposition 8, Eq. 45 and Appendix F: the cost of solving a linear on features that it does not
have in the finished model.

Legend: N tokens of a task · d inputs · o outputs · u a linear's input (N, d) · y its target (N, o)
· W (o, d) · A the anchor. The objective is that of Eq. 47 as printed: tasks unweighted, no bias,
every token alike.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from operator import iadd
from typing import Any

import torch
from torch import Tensor, nn

from featcal.core.moments import Moments
from featcal.core.ridge import anchor, solve_ridge, task_system
from featcal.models.batch import Batch
from featcal.models.modules import solved_modules
from featcal.models.plan import blocks_of, plan_for
from featcal.settings import Calibration
from reproduction.theory.tower import Checks, Tower, relative, tower


@dataclass(frozen=True)
class SiteData:
    """A linear's inputs and the targets that follow from them (Eq. 10), by task."""

    u: dict[str, Tensor]
    y: dict[str, Tensor]


@dataclass(frozen=True)
class Linear:
    """One linear of the experts, and its inputs there."""

    weights: dict[str, Tensor]  # W_i (o, d) by task
    x: dict[str, Tensor]  # x_exp (N, d) by task
    anchor: Tensor  # (o, d), Eq. 11

    def source(self, u: Mapping[str, Tensor], alpha: float) -> SiteData:
        """Return inputs with their targets W_i (α x_exp + (1 − α) u)."""
        y = {t: (alpha * self.x[t] + (1 - alpha) * u[t]) @ W.T for t, W in self.weights.items()}
        return SiteData(dict(u), y)


def errors(W: Tensor, source: SiteData) -> dict[str, Tensor]:
    """Return (W u − y)² by task."""
    return {task: (u @ W.T - source.y[task]) ** 2 for task, u in source.u.items()}


def loss(W: Tensor, source: SiteData) -> float:
    """Return Σ over tasks of the mean of ‖W u − y‖² over tokens: Eq. 47 without its last term."""
    return sum(float(squares.sum(1).mean()) for squares in errors(W, source).values())


def relative_loss(W: Tensor, source: SiteData) -> float:
    """Return ‖W u − y‖ / ‖y‖ over all tasks and tokens."""
    squares = sum(float(s.sum()) for s in errors(W, source).values())
    return (squares / sum(float((y**2).sum()) for y in source.y.values())) ** 0.5


def objective(W: Tensor, source: SiteData, linear: Linear, ridge: float) -> float:
    """Return J(W) of Eq. 47."""
    return loss(W, source) + ridge * float(((W - linear.anchor) ** 2).sum())


def minimum(source: SiteData, linear: Linear, settings: Calibration) -> Tensor:
    """Return W* of Eq. 47, by the solver that calibration uses."""
    total: Any = None
    for task, u in source.u.items():
        moments = Moments.zero(u.shape[1], device=u.device)
        moments.add(u, linear.x[task], u.new_ones(len(u)))
        W = linear.weights[task]
        share = task_system(moments, W, W.new_zeros(len(W)), settings.interpolation, "uniform")
        total = share if total is None else iadd(total, share)
    no_bias = linear.anchor.new_zeros(len(linear.anchor))
    return solve_ridge(total, linear.anchor, no_bias, settings.ridge).weight


@dataclass(frozen=True)
class Mismatch:
    """Both sides of Proposition 8 for one linear, on the weights between the two minima."""

    gap: float  # J_dep(W_src) − J_dep(W_dep), at least 0
    best: float  # J_dep(W_dep)
    largest: float  # the right side of Eq. 48
    transport: float  # the right side of Eq. 49


def mismatch(src: SiteData, dep: SiteData, linear: Linear, settings: Calibration) -> Mismatch:
    """Compute both sides of Eqs. 48 and 49 on the segment between the minima."""
    W_src, W_dep = minimum(src, linear, settings), minimum(dep, linear, settings)
    at = [loss(W, dep) - loss(W, src) for W in (W_src, (W_src + W_dep) / 2, W_dep)]
    sides = [objective(W, dep, linear, settings.ridge) for W in (W_src, W_dep)]
    slope = steepness(src, dep, (W_src, W_dep))
    moved = sum(wasserstein(src, dep, task) for task in src.u)
    return Mismatch(sides[0] - sides[1], sides[1], 2 * peak(*at), 2 * slope * moved)


def peak(start: float, middle: float, end: float) -> float:
    """Return the largest |value| on [0, 1] of the parabola through three even places."""
    curve, slope = 2 * (start + end) - 4 * middle, 4 * middle - 3 * start - end
    values = [abs(start), abs(end)]
    if curve and 0 < -slope / (2 * curve) < 1:
        values.append(abs(start - slope**2 / (4 * curve)))
    return max(values)


def steepness(src: SiteData, dep: SiteData, ends: tuple[Tensor, Tensor]) -> float:
    """Return K of Eq. 49, 2 max ‖W u − y‖ √(1 + ‖W‖²); it is convex in W, so the ends decide."""
    pairs = [(u, source.y[task]) for source in (src, dep) for task, u in source.u.items()]
    farthest = max(float((u @ W.T - y).norm(dim=1).max()) for W in ends for u, y in pairs)
    widest = max(float(torch.linalg.matrix_norm(W, 2)) for W in ends)
    return 2 * farthest * (1 + widest**2) ** 0.5


def wasserstein(src: SiteData, dep: SiteData, task: str) -> float:
    """Return the exact 1-Wasserstein distance of the pairs (u, y) of a task, by matching tokens."""
    from scipy.optimize import linear_sum_assignment

    pairs = (torch.cat([s.u[task], s.y[task]], dim=1) for s in (src, dep))
    cost = torch.cdist(*pairs, compute_mode="donot_use_mm_for_euclid_dist").cpu().numpy()
    rows, columns = linear_sum_assignment(cost)
    return float(cost[rows, columns].mean())


SiteInputs = dict[str, dict[str, Tensor]]  # by linear, by task: rows (tokens, d)


@dataclass(frozen=True)
class SourceModels:
    """The models of Appendix F; solved on own features (forward) or the merged model's (stale)."""

    base: nn.Module
    merged: nn.Module
    experts: Mapping[str, nn.Module]
    forward: nn.Module
    stale: nn.Module


@torch.no_grad()
def check_sources(
    models: SourceModels, batches: Mapping[str, Batch], settings: Calibration, checks: Checks
) -> None:
    """Check Proposition 8 and Eq. 45 for every linear of every block."""
    several = (models.merged, models.forward, models.stale)
    merged, forward, stale = ({t: tower(m, x) for t, x in batches.items()} for m in several)
    experts = {task: tower(models.experts[task], x) for task, x in batches.items()}
    check_prefix(models, batches, forward, checks)
    sides: dict[str, Mismatch] = {}
    for index, block in enumerate(next(iter(experts.values())).blocks):
        names = list(solved_modules(block, norm=False)[0])
        inputs = partial(site_inputs, index, names)
        expert_inputs = inputs(experts, experts)
        # the inputs that each was solved on, and those in the finished model
        used = {"stale": inputs(merged, merged), "forward": inputs(merged, forward)}
        final = {"stale": inputs(stale, stale), "forward": inputs(forward, forward)}
        weights = {"stale": models.stale, "forward": models.forward}
        for kind in used:
            squares = [_squares(used[kind][name], final[kind][name]) for name in names]
            change = torch.stack(squares).sum(0)
            moved = 100 * float((change[0] / change[1]).sqrt())
            checks.add("proposition_8", f"{kind}_moved", moved, len(names), block=f"{index:02d}")
        fits: dict[str, list[float]] = {}
        for name in names:
            expert_weights = {t: weight(m, index, name) for t, m in models.experts.items()}
            merged_and_base = (weight(model, index, name) for model in (models.merged, models.base))
            A, alpha = anchor(*merged_and_base, settings.anchor_blend), settings.interpolation
            linear = Linear(expert_weights, expert_inputs[name], A)
            sources = {kind: linear.source(used[kind][name], alpha) for kind in used}
            for kind in used:
                W = weight(weights[kind], index, name)
                deployed = linear.source(final[kind][name], alpha)
                for suffix, site in (("on_source", sources[kind]), ("deployed", deployed)):
                    fits.setdefault(f"{kind}_{suffix}", []).append(relative_loss(W, site))
            if index:  # the first block's source is the same for both
                side = mismatch(sources["stale"], sources["forward"], linear, settings)
                sides[f"{index:02d}.{name}"] = side
        for quantity, values in fits.items():
            mean = 100 * sum(values) / len(values)
            checks.add("proposition_8", quantity, mean, len(values), block=f"{index:02d}")
    bounds_of = {"proposition_8": "largest", "proposition_8_transport": "transport"}
    for statement, bound in bounds_of.items():
        rows = [[side.gap, getattr(side, bound)] for side in sides.values()]
        gaps, bounds = torch.tensor(rows, dtype=torch.float64).reshape(-1, 2).T
        checks.bounded(statement, bounds, gaps)
        for i, linear_name in enumerate(sides):
            checks.show(statement, gaps[i : i + 1], bounds[i : i + 1], linear_name)
    for linear_name, side in sides.items():
        checks.add("proposition_8", "excess", 100 * side.gap / side.best, 1, block=linear_name)


def site_inputs(
    index: int, names: list[str], towers: Mapping[str, Tower], hidden: Mapping[str, Tower]
) -> SiteInputs:
    """Return the inputs of a block's linears in towers, given the features of others before it."""
    rows = {t: tower.inputs(index, hidden[t].features[index], names) for t, tower in towers.items()}
    return {name: {task: x[name] for task, x in rows.items()} for name in names}


def check_prefix(
    models: SourceModels, batches: Mapping[str, Batch], forward: Mapping[str, Tower], checks: Checks
) -> None:
    """Check Eq. 45: a block's input does not change when it and later ones are calibrated."""
    half = deepcopy(models.merged)
    stack = plan_for(half).stacks[0]
    errors = []
    pairs = zip(blocks_of(half, stack), blocks_of(models.forward, stack), strict=True)
    for index, (block, solved) in enumerate(pairs):
        for task, x in batches.items():
            final = forward[task].features[index]
            errors.append(relative(tower(half, x).features[index] - final, final))
        block.load_state_dict(solved.state_dict())
    checks.exact("equation_45", "digits", torch.cat(errors))


def weight(model: nn.Module, index: int, name: str) -> Tensor:
    """Return the weight (o, d) of one linear of one block."""
    block = blocks_of(model, plan_for(model).stacks[0])[index]
    return block.get_submodule(name).get_parameter("weight").detach()


def _squares(used: Mapping[str, Tensor], final: Mapping[str, Tensor]) -> Tensor:
    """Return Σ‖used − final‖² and Σ‖final‖² over all tasks, (2,)."""
    pairs = [(x, final[task]) for task, x in used.items()]
    squares: Any = sum(((a - b) ** 2).sum() for a, b in pairs)
    return torch.stack([squares, sum((b**2).sum() for _, b in pairs)])
