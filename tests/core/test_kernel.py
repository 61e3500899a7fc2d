"""The small side of the system against least squares on stacked rows and against the direct
form.
"""

import numpy as np
import pytest
import torch
from test_ridge import ALPHA, CLOSE, INPUTS, OUTPUTS, RIDGE, moments, tall, task

from featcal.core.kernel import KernelSystem, solve_kernel, task_rows
from featcal.core.moments import Moments, Rows
from featcal.core.ridge import RidgeSystem, joined, solve_ridge, task_system
from featcal.errors import SingularGram

FEW = [task(1, n=4), task(2, n=3), task(3, n=2)]
ANCHORS = task(99)[3:]


def kernel(tasks, A, a, ridge=RIDGE, lags=None, **more):
    """Tokens of every task in two batches."""
    total = KernelSystem()
    for number, (x, y, w, W, b) in enumerate(tasks):
        rows = Rows()
        for part in torch.arange(len(x)).chunk(2):
            rows.add(x[part], y[part], w[part], lags[number][part] if lags else None)
        total += task_rows(rows, W, b, A, a, ALPHA)
    return solve_kernel(total, A, a, ridge, **more, site="vision.00.fc2")


@pytest.mark.parametrize("task_weights", ["gram", "uniform"])
def test_few_tokens_equal_tall_least_squares(task_weights):
    solution = kernel(FEW, *ANCHORS, task_weights=task_weights)
    W, b = tall(FEW, *ANCHORS, uniform=task_weights == "uniform")
    np.testing.assert_allclose(solution.weight, W, **CLOSE)
    np.testing.assert_allclose(solution.bias, b, **CLOSE)


@pytest.mark.parametrize("affine", ["separate", "joint"])
@pytest.mark.parametrize("lagging", [False, True])
def test_few_tokens_equal_the_direct_form(affine, lagging):
    A, a = ANCHORS
    lags = [torch.randn(len(x), OUTPUTS, dtype=torch.float64) for x, *_ in FEW] if lagging else None
    total = RidgeSystem.zero(INPUTS, OUTPUTS)
    for number, (x, y, w, W, b) in enumerate(FEW):
        m = Moments.zero(INPUTS, OUTPUTS, lagging=True) if lags else moments(x, y, w)
        if lags:
            m.add(x, y, w, y @ W.T + b, lags[number])
        total += task_system(m, W, b, ALPHA, affine=affine)
    direct = solve_ridge(joined(total, a, RIDGE) if affine == "joint" else total, A, a, RIDGE)
    small = kernel(FEW, A, a, lags=lags, affine=affine)
    torch.testing.assert_close(small.weight, direct.weight, **CLOSE)
    torch.testing.assert_close(small.bias, direct.bias, **CLOSE)


def single(tasks):
    """Features and weights as a model holds them."""
    return [tuple(part.float() for part in each) for each in tasks]


@pytest.mark.parametrize("ridge", [0.05, 1e-3, 1e-5])
def test_float32_features_cost_less_than_a_millionth_of_the_step(ridge):
    tasks, (A, a) = (
        single([task(seed, n=20, d=96, o=24) for seed in range(3)]),
        (t.float() for t in task(99, d=96, o=24)[3:]),
    )
    A = tasks[0][3] + 0.1 * A  # near the experts, as an anchor is
    tasks = [(x, y, w, tasks[0][3] + 0.1 * W, b) for x, y, w, W, b in tasks]
    A, a, exact = A.double(), a.double(), [tuple(part.double() for part in each) for each in tasks]
    step = torch.from_numpy(tall(exact, A, a, ridge=ridge)[0]) - A
    assert (kernel(tasks, A, a, ridge).weight - A - step).norm() < 1e-6 * step.norm()


def test_tokens_without_weight_and_tasks_without_tokens_add_nothing():
    x, y, w, W, b = task(4, n=5)
    none = [(x, y, 0 * w, W, b)]
    padded = [
        tuple(
            torch.cat([part, other]) for part, other in zip(FEW[0][:3], (x, y, 0 * w), strict=True)
        )
        + FEW[0][3:]
    ]
    expected, found = kernel(FEW[:1], *ANCHORS), kernel(padded + none, *ANCHORS)
    assert torch.equal(found.weight, expected.weight) and torch.equal(found.bias, expected.bias)
    nothing = kernel(none, *ANCHORS)
    assert torch.equal(nothing.weight, ANCHORS[0]) and torch.equal(nothing.bias, ANCHORS[1])


def test_conditioning_is_a_lower_bound_of_the_left_sides():
    left = RIDGE * torch.eye(INPUTS, dtype=torch.float64)
    for x, y, w, W, b in FEW:
        left += task_system(moments(x, y, w), W, b, ALPHA).left
    assert 1 <= kernel(FEW, *ANCHORS).conditioning <= 1.000001 * float(torch.linalg.cond(left))


def test_tokens_that_are_no_numbers_raise_with_the_site():
    x, y, w, W, b = task(1, n=4)
    with pytest.raises(SingularGram, match=r"vision.00.fc2"):
        kernel([(x * float("nan"), y, w, W, b)], *ANCHORS)
