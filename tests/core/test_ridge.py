"""The solution of one linear against least squares on stacked rows, which forms no Gram matrix."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import seeded

from featcal.core.moments import Moments, add_gram, mirror
from featcal.core.ridge import RidgeSystem, solve_ridge, task_system
from featcal.errors import SingularGram

INPUTS, OUTPUTS, RIDGE, ALPHA = 12, 7, 0.05, 0.3
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def task(seed, n=60):
    """Rows of student and teacher, token weights, the expert's linear."""
    g = seeded(seed)
    r = partial(torch.randn, generator=g, dtype=torch.float64)
    x_cal = r(n, INPUTS) + r(INPUTS)
    w = torch.rand(n, generator=g, dtype=torch.float64)
    return x_cal, x_cal + 0.3 * r(n, INPUTS), w, r(OUTPUTS, INPUTS), r(OUTPUTS)


def system(tasks, task_weights="gram", target="input"):
    total = RidgeSystem.zero(INPUTS, OUTPUTS)
    for x, y, w, W, b in tasks:
        made = {"output": F.linear(y, W, b), "blend": torch.lerp(x, y, ALPHA) @ W.T}.get(target)
        m = Moments.zero(INPUTS, None if made is None else OUTPUTS)
        m.add(x, y, w, made)
        m.blended = target == "blend"
        total += task_system(m, W, b, ALPHA, task_weights)
    return total


def tall(tasks, A, a, uniform=False):
    """Weight, then bias, by least squares over rows scaled by √(ω w/n), anchors scaled by √λ."""
    root = np.sqrt(RIDGE)
    lefts, rights, means = [root * np.eye(A.shape[1])], [root * A.numpy().T], []
    for x, y, w, W, b in tasks:
        x, y, w, W, b = (t.numpy() for t in (x, y, w, W, b))
        share = w / w.sum()
        omega = 1.0 if uniform else 1 / np.linalg.norm((share[:, None] * x).T @ x)
        scale, target = np.sqrt(omega * share)[:, None], ALPHA * y + (1 - ALPHA) * x
        lefts.append(scale * x)
        rights.append(scale * (target @ W.T))
        means.append((np.sqrt(omega), share @ x, b + W @ (share @ target)))
    W_star = np.linalg.lstsq(np.vstack(lefts), np.vstack(rights), rcond=None)[0].T
    column = np.array([scale for scale, _, _ in means] + [root])[:, None]
    gaps = [scale * (y - W_star @ mu) for scale, mu, y in means]
    return W_star, np.linalg.lstsq(column, np.vstack([*gaps, root * a.numpy()]), rcond=None)[0][0]


@pytest.mark.parametrize("tokens", [[60], [60, 50, 40], [4, 3]])  # also fewer than features
@pytest.mark.parametrize("target", ["input", "output", "blend"])
@pytest.mark.parametrize("task_weights", ["gram", "uniform"])
def test_weight_and_bias_equal_tall_least_squares(tokens, target, task_weights):
    tasks = [task(seed, n) for seed, n in enumerate(tokens)]
    _, _, _, A, a = task(99)
    solution = solve_ridge(system(tasks, task_weights=task_weights, target=target), A, a, RIDGE)
    W, b = tall(tasks, A, a, uniform=task_weights == "uniform")
    np.testing.assert_allclose(solution.weight, W, **CLOSE)
    np.testing.assert_allclose(solution.bias, b, **CLOSE)


def test_no_data_returns_the_anchor_to_the_bit():
    _, _, _, A, a = task(99)
    empty = task_system(Moments.zero(INPUTS), *task(1)[3:], ALPHA)
    for nothing in (RidgeSystem.zero(INPUTS, OUTPUTS), empty):
        solution = solve_ridge(nothing, A, a, RIDGE)
        assert torch.equal(solution.weight, A) and torch.equal(solution.bias, a)


@pytest.mark.parametrize("d", [1, 3, 32, 130, 1100])
def test_gram_in_stripes_equals_the_plain_product(d):
    parts = torch.randn(2, 50, d, generator=seeded(1), dtype=torch.float64)
    G = torch.zeros(d, d, dtype=torch.float64)
    for x in parts:
        add_gram(G, x)
    torch.testing.assert_close(mirror(G), torch.einsum("kni,knj->ij", parts, parts))


def test_conditioning_is_a_lower_bound_and_respects_the_bound_of_unit_norm_grams():
    tasks = [task(seed) for seed in range(3)]
    total = system(tasks)
    true = float(torch.linalg.cond(total.left + RIDGE * torch.eye(INPUTS, dtype=torch.float64)))
    estimate = solve_ridge(total, *task(99)[3:], RIDGE).conditioning
    assert 1 <= estimate <= true <= (len(tasks) + RIDGE) / RIDGE


@pytest.mark.parametrize(("side", "broken"), [("left", np.nan), ("left", -1), ("right", np.nan)])
def test_sums_without_a_finite_solution_raise_with_the_site_and_a_way_out(side, broken):
    total = system([task(1)])
    getattr(total, side)[0, 0] = broken
    with pytest.raises(SingularGram, match="vision.00.fc1") as error:
        solve_ridge(total, *task(99)[3:], RIDGE, site="vision.00.fc1")
    assert "ridge=0.05" in str(error.value) and "a larger ridge" in str(error.value)
