"""The λ path of one linear against a solution at every λ, and its gains against sums over rows."""

import pytest
import torch
from test_ridge import CLOSE, INPUTS, OUTPUTS, system, task
from tiny import seeded

from featcal.core.path import ridge_path
from featcal.core.ridge import RidgeSystem, solve_ridge
from featcal.errors import SingularGram

RIDGES = (1e-6, 1e-3, 0.05, 1.0, 100.0)


def anchors():
    g = seeded(7)
    A = torch.randn(OUTPUTS, INPUTS, generator=g, dtype=torch.float64)
    return A, torch.randn(OUTPUTS, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize(("count", "rows"), [(3, 60), (1, 5)])  # 5 rows are fewer than the inputs
def test_the_path_is_the_direct_solution_at_every_ridge(count, rows, folded):
    tasks, (A, a) = [task(seed, n=rows) for seed in range(count)], anchors()
    path = ridge_path(system(tasks, folded=folded), A)
    for ridge in RIDGES:
        direct = solve_ridge(system(tasks, folded=folded), A, a, ridge).weight
        torch.testing.assert_close(path.weight(ridge), direct, **CLOSE)


def test_gains_are_the_loss_at_the_anchor_minus_the_loss_at_the_weight_on_held_out_rows():
    seen, held_out = [task(0), task(1)], [task(20, n=30), task(21, n=30)]
    A, _ = anchors()

    def loss(W):
        total = 0
        for x, y, w, W_exp, _ in held_out:
            omega = 1 / ((w[:, None] * x).T @ x / w.sum()).norm()
            target = 0.3 * y + 0.7 * x
            total += omega * (w[:, None] * (x @ W.T - target @ W_exp.T) ** 2).sum() / w.sum()
        return total

    path = ridge_path(system(seen), A)
    expected = torch.stack([loss(A) - loss(path.weight(ridge)) for ridge in RIDGES])
    torch.testing.assert_close(path.gains(system(held_out), RIDGES), expected, **CLOSE)


def test_without_data_the_path_is_the_anchor_and_nan_has_none():
    A, _ = anchors()
    nothing = RidgeSystem.zero(INPUTS, OUTPUTS)
    assert torch.equal(ridge_path(nothing, A).weight(0.1), A)
    nothing.left[0, 0] = torch.nan
    with pytest.raises(SingularGram):
        ridge_path(nothing, A)
