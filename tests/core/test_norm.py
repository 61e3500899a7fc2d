"""Scale and shift of a LayerNorm against least squares, one feature at a time."""

import numpy as np
import pytest
import torch
from tiny import seeded
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from featcal.core.norm import norm_sums, norm_system, solve_norm
from featcal.models.modules import is_norm, normalised

D, RIDGE = 5, 0.05
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def task(seed, n=40):
    g = seeded(seed)
    z = torch.randn(n, D, generator=g, dtype=torch.float64) + 0.5
    w = torch.rand(n, generator=g, dtype=torch.float64)
    gain, shift = torch.randn(2, D, generator=g, dtype=torch.float64)
    return z, w, gain, shift


def system(tasks, with_shift=True):
    total = torch.zeros(5, D, dtype=torch.float64)
    for z, w, gain, shift in tasks:
        sums = sum(norm_sums(z[rows], w[rows]) for rows in torch.arange(len(z)).chunk(3))
        total = total + norm_system(sums, gain, shift if with_shift else None, w.sum())
    return total


def by_feature(tasks, gain0, shift0, with_shift=True):
    """Least squares of each feature over all tokens, tasks weighted alike, anchors scaled by √λ."""
    solved, root = [], np.sqrt(RIDGE)
    for k in range(D):
        left, right = [root * np.eye(2)], [root * np.array([float(gain0[k]), float(shift0[k])])]
        for z, w, gain, shift in tasks:
            scale, column = np.sqrt((w / w.sum()).numpy()), z[:, k].numpy()
            ones = np.full_like(column, float(with_shift))
            left.append(scale[:, None] * np.stack([column, ones], axis=1))
            right.append(scale * (float(gain[k]) * column + ones * float(shift[k])))
        solved.append(np.linalg.lstsq(np.vstack(left), np.concatenate(right), rcond=None)[0])
    return np.array(solved).T


@pytest.mark.parametrize(("count", "with_shift"), [(1, True), (3, True), (3, False)])
def test_scale_and_shift_equal_least_squares_of_every_feature(count, with_shift):
    tasks, (_, _, gain0, shift0) = [task(seed) for seed in range(count)], task(99)
    given = shift0 if with_shift else None
    gain, shift = solve_norm(system(tasks, with_shift), gain0, given, RIDGE)
    expected = by_feature(tasks, gain0, with_shift * shift0, with_shift)
    np.testing.assert_allclose(gain, expected[0], **CLOSE)
    if with_shift:
        np.testing.assert_allclose(shift, expected[1], **CLOSE)
    else:
        assert shift is None


def test_no_data_returns_the_anchors_exactly():
    _, _, gain0, shift0 = task(99)
    empty = norm_system(torch.zeros(3, D), gain0, shift0, torch.zeros(()))
    for nothing in (torch.zeros_like(empty), empty):
        gain, shift = solve_norm(nothing, gain0, shift0, RIDGE)
        assert torch.equal(gain, gain0) and torch.equal(shift, shift0)


@pytest.mark.parametrize("module", [torch.nn.LayerNorm(D, eps=1e-3), LlamaRMSNorm(D, eps=1e-3)])
def test_normalised_features_scaled_and_shifted_are_the_output_of_the_module(module):
    x = 3 + torch.randn(2, 4, D, generator=seeded(1))
    with torch.no_grad():
        module.weight.copy_(torch.linspace(0.5, 2, D))
        bias = getattr(module, "bias", None)
        shift = 0 if bias is None else bias.copy_(torch.linspace(-1, 1, D))
        assert is_norm(module)
        torch.testing.assert_close(normalised(module, x) * module.weight + shift, module(x))
