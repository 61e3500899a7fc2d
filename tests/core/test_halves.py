"""λ by halves against solving on one half's samples and measuring on the other's, in float64."""

from functools import partial
from math import inf

import numpy as np
import pytest
import torch
from tiny import seeded

from featcal.core.moments import Moments
from featcal.core.norm import norm_ridge_by_halves, norm_sums, norm_system, solve_norm
from featcal.core.ridge import eliminate_bias, ridge_by_halves, solve_ridge, task_halves

ALPHA = 0.7


def rows(seed, samples=20, tokens=6, d=12, o=5, noise=1.0):
    """Rows with their sample's number, the expert's linear, and noise that halves do not share."""
    r = partial(torch.randn, generator=seeded(seed), dtype=torch.float64)
    sample = torch.arange(samples).repeat_interleave(tokens)
    x = (r(samples, d) * torch.logspace(0, -2, d))[sample] + 0.1 * r(samples * tokens, d)
    W, b = r(o, d), r(o)
    return x, x @ W.T + b + noise * r(samples, o)[sample], sample, W, b


def systems(tasks, affine):
    """Both halves' systems of tasks whose expert outputs y are given."""
    total = []
    for x, y, sample, W, b in tasks:
        halves = [Moments.zero(x.shape[1], len(W)) for _ in range(2)]
        for half, m in enumerate(halves):
            m.add(x, x, (sample % 2 == half).double(), y)
        shares = task_halves(halves, W, b, ALPHA, "gram", affine)
        total = [s.__iadd__(t) for s, t in zip(total, shares, strict=True)] if total else shares
    return total


def error(tasks, A, a, ridge, joint):
    """E by ridge regression on one half's rows, and squared errors on the other half's rows."""
    total = 0.0
    for k in (0, 1):
        lefts, rights, tests = [], [], []
        for x, y, sample, W, b in tasks:
            x, sample = x.numpy(), sample.numpy()
            target = ALPHA * y.numpy() + (1 - ALPHA) * (x @ W.numpy().T + b.numpy())
            target = target if joint else target - b.numpy()
            root = np.sqrt(1 / len(x) / np.linalg.norm(x.T @ x / len(x)))
            z = root * (np.hstack([x, np.ones((len(x), 1))]) if joint else x)
            lefts.append(z[sample % 2 != k])
            rights.append(root * target[sample % 2 != k])
            tests.append((z[sample % 2 == k], root * target[sample % 2 == k]))
        anchor = np.hstack([A.numpy(), a.numpy()[:, None]]) if joint else A.numpy()
        left = np.vstack([*lefts, np.sqrt(ridge) * np.eye(anchor.shape[1])])
        W_k = np.linalg.lstsq(left, np.vstack([*rights, np.sqrt(ridge) * anchor.T]), rcond=None)[0]
        for z, t in tests:
            total += ((t - z @ W_k) ** 2).sum() - ((t - z @ anchor.T) ** 2).sum()
    return total


GRID = 10 ** np.arange(-6, 2.01, 0.125)


@pytest.mark.parametrize("affine", ["joint", "separate"])
@pytest.mark.parametrize("noise", [0.03, 0.3, 3.0])
def test_chosen_ridge_is_the_best_on_the_other_half_of_the_samples(affine, noise):
    tasks = [rows(seed, noise=noise) for seed in range(3)]
    A, a = tasks[0][3] + 0.3 * rows(9)[3], tasks[0][4]
    ridge = ridge_by_halves(systems(tasks, affine), A, a, affine)
    errors = {r: error(tasks, A, a, r, affine == "joint") for r in GRID}
    assert error(tasks, A, a, ridge, affine == "joint") <= 0.98 * min(errors.values())


def test_without_data_the_anchor_stays_and_much_data_gives_least_squares():
    x, y, sample, W, b = rows(0, samples=4000, tokens=1, noise=0.01)
    A, a = torch.zeros_like(W), torch.zeros_like(b)
    none = [Moments.zero(12, 5) for _ in range(2)]
    assert ridge_by_halves(task_halves(none, W, b, 1.0, "gram", "joint"), A, a, "joint") == inf
    halves = systems([(x, y, sample, W, b)], "joint")
    ridge = ridge_by_halves(halves, A, a, "joint")
    whole = halves[0]
    whole += halves[1]
    solution = solve_ridge(eliminate_bias(whole, a, ridge), A, a, ridge)
    torch.testing.assert_close(solution.weight, W, rtol=0, atol=0.02)
    torch.testing.assert_close(solution.bias, b, rtol=0, atol=0.02)


def test_projected_error_of_many_outputs_is_within_2_percent():
    """Against all outputs: one eigendecomposition of a half gives E at every λ."""
    tasks = [rows(0, samples=24, tokens=8, d=160, o=600, noise=0.5)]
    A, a = tasks[0][3] + 0.1 * rows(9, d=160, o=600)[3], tasks[0][4]
    halves = systems(tasks, "separate")

    def exact(ridge):
        total = 0.0
        for train, held_out in (halves, halves[::-1]):
            g, V = torch.linalg.eigh(train.left)
            M, N = (V.T @ (half.right - half.left @ A.T) for half in (train, held_out))
            u = 1 / (g + ridge)
            total += float(u @ ((M @ M.T) * (V.T @ held_out.left @ V)) @ u - 2 * u @ (M * N).sum(1))
        return total

    ridge = ridge_by_halves(halves, A, a, "separate")
    assert exact(ridge) <= 0.98 * min(exact(float(r)) for r in GRID)


@pytest.mark.parametrize("with_shift", [True, False])
def test_norms_are_chosen_by_the_error_on_the_other_half(with_shift):
    g = seeded(3)
    z = torch.randn(30, 8, generator=g, dtype=torch.float64) + 0.2
    gain, shift = torch.rand(2, 8, generator=g, dtype=torch.float64)
    parts = [norm_sums(z[half::2], torch.ones(15, dtype=torch.float64)) for half in (0, 1)]
    n = parts[0][2, 0] + parts[1][2, 0]
    b = shift if with_shift else None
    halves = [norm_system(sums, gain, b, n) for sums in parts]
    anchor, b_anchor = gain + 0.5, None if b is None else b - 0.5
    ridge = norm_ridge_by_halves(halves, anchor, b_anchor)

    def measured(ridge):
        total = 0.0
        for k in (0, 1):
            new, new_shift = solve_norm(halves[1 - k], anchor, b_anchor, ridge)
            goal, own = z[k::2] * gain, z[k::2] * new
            if b is not None:
                goal, own = goal + b, own + new_shift
            total += float(((goal - own) ** 2).sum())
        return total

    assert measured(ridge) <= 1.02 * min(measured(float(r)) for r in GRID)
    assert norm_ridge_by_halves(halves, gain, b) == inf  # nothing is to be gained
