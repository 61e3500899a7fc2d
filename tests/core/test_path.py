"""The λ path of one linear against a direct solution at every λ, and its gains against sums over
the rows themselves.
"""

import pytest
import torch
from test_ridge import INPUTS, OUTPUTS, moments, system, task
from tiny import seeded

from featcal.core.path import ridge_path
from featcal.core.ridge import RidgeSystem, solve_ridge
from featcal.errors import SingularGram

RIDGES = (1e-6, 1e-3, 0.05, 1.0, 100.0)


def anchors():
    g = seeded(7)
    return torch.randn(OUTPUTS, INPUTS, generator=g, dtype=torch.float64), torch.randn(
        OUTPUTS, generator=g, dtype=torch.float64
    )


@pytest.mark.parametrize("folded", [False, True])
def test_the_path_is_the_direct_solution_at_every_ridge(folded):
    tasks, (A, a) = [task(seed) for seed in range(3)], anchors()
    path = ridge_path(system(tasks, folded=folded), A)
    for ridge in RIDGES:
        torch.testing.assert_close(
            path.weight(ridge),
            solve_ridge(system(tasks, folded=folded), A, a, ridge).weight,
            rtol=1e-9,
            atol=1e-9,
        )


def test_fewer_rows_than_inputs_leave_the_path_as_near_to_the_solution():
    tasks, (A, a) = [task(1, n=5)], anchors()
    for ridge in RIDGES:
        direct = solve_ridge(system(tasks), A, a, ridge).weight
        torch.testing.assert_close(
            ridge_path(system(tasks), A).weight(ridge), direct, rtol=1e-9, atol=1e-9
        )


def test_gains_are_the_loss_at_the_anchor_less_the_loss_at_the_weight_on_the_rows_held_out():
    seen, apart, (A, _) = (
        [task(seed) for seed in range(2)],
        [task(20 + seed, n=30) for seed in range(2)],
        anchors(),
    )

    def loss(W):
        total = 0
        for x, y, w, W_exp, _ in apart:
            omega = (
                1 / (moments(x, x, w).G.triu() + moments(x, x, w).G.triu(1).T).div(w.sum()).norm()
            )
            target = 0.3 * y + 0.7 * x
            total += omega * (w[:, None] * (x @ W.T - target @ W_exp.T) ** 2).sum() / w.sum()
        return total

    path = ridge_path(system(seen), A)
    expected = torch.stack([loss(A) - loss(path.weight(ridge)) for ridge in RIDGES])
    torch.testing.assert_close(path.gains(system(apart), RIDGES), expected, rtol=1e-9, atol=1e-9)


def test_without_data_the_path_is_the_anchor_and_nan_has_none():
    A, _ = anchors()
    nothing = RidgeSystem.zero(INPUTS, OUTPUTS)
    assert torch.equal(ridge_path(nothing, A).weight(0.1), A)
    nothing.left[0, 0] = torch.nan
    with pytest.raises(SingularGram):
        ridge_path(nothing, A)
