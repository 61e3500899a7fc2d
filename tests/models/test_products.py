"""oneDNN's products are MKL's up to rounding, whatever lies in memory, and only inside the
`with`.
"""

import pytest
import torch
from torch.nn.functional import linear

from featcal.models import products
from featcal.models.products import onednn_products

SHAPES = [
    (256, 192, 192),
    (512, 768, 96),
    (400, 200, 300),
    (1, 3200, 3200),
    (3200, 1, 700),
    (5, 7, 3),
]


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layouts(rows, columns, seed):
    """The same matrix as it is, as a transpose, as a slice of wider rows, and as a slice of a wider
    transpose.
    """
    x = drawn(rows, columns, seed=seed)
    wider, longer = drawn(rows, columns + 9), drawn(columns, rows + 9)
    wider[:, 4:-5], longer[:, 4:-5] = x, x.T
    return [x, x.T.contiguous().T, wider[:, 4:-5], longer[:, 4:-5].T]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def computed(monkeypatch):
    """How many products were oneDNN's."""
    count, ours = [], products._linear
    monkeypatch.setattr(products, "_linear", lambda *given: count.append(1) or ours(*given))
    return count


@pytest.mark.parametrize(("intel", "ours"), [(True, 0), (False, 1)])
def test_products_are_onednns_where_the_processor_is_not_intels(intel, ours, computed, monkeypatch):
    monkeypatch.setattr(products, "made_by_intel", lambda: intel)
    with products.faster_products():
        assert drawn(256, 192) @ drawn(192, 192) is not None and len(computed) == ours


@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_every_layout_are_those_of_float64(shape, computed):
    n, d, o = shape
    expected = layouts(n, d, 1)[0].double() @ layouts(d, o, 2)[0].double()
    bias = drawn(o, seed=3)
    with onednn_products():
        for a in layouts(n, d, 1):
            for b in layouts(d, o, 2):
                torch.testing.assert_close(
                    (a @ b).double(), expected, rtol=1e-4, atol=1e-4 * d**0.5
                )
                torch.testing.assert_close(
                    torch.addmm(bias, a, b).double(), expected + bias, rtol=1e-4, atol=1e-4 * d**0.5
                )
    assert len(computed) == (32 if min(shape) >= products.NARROWEST else 0)


def test_long_sums_round_no_worse_than_torch_alone(computed):
    x = drawn(2176, 256) + 1
    exact = x.double().T @ x.double()
    off = lambda G: float((G - exact).abs().mean())  # noqa: E731
    alone = off(x.T @ x)
    with onednn_products():
        ours = off(x.T @ x)
    assert ours < 1.5 * alone and len(computed) == 1


def test_gradients_go_through(computed):
    x, W, b = (
        drawn(*shape, seed=i).requires_grad_()
        for i, shape in enumerate([(2, 512, 192), (192, 192), (192,)])
    )
    expected = torch.autograd.grad(linear(x, W, b).square().sum(), (x, W, b))
    with onednn_products():
        found = torch.autograd.grad(linear(x, W, b).square().sum(), (x, W, b))
    assert len(computed) == 3  # forward, input's gradient, weight's gradient
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_other_precisions_are_left_to_torch(dtype, computed):
    a, b = (drawn(200, 200, seed=i).mul(5).to(dtype) for i in range(2))
    expected = a @ b, torch.addmm(a[0], a, b, beta=2, alpha=3)
    with onednn_products():
        assert torch.equal(a @ b, expected[0]) and torch.equal(
            torch.addmm(a[0], a, b, beta=2, alpha=3), expected[1]
        )
    assert not computed


def test_a_scaled_sum_is_left_to_torch(computed):
    a, b, c = (drawn(200, 200, seed=i) for i in range(3))
    expected = torch.addmm(c, a, b, beta=0.5, alpha=2), torch.addmm(c, a, b)
    with onednn_products():
        assert torch.equal(torch.addmm(c, a, b, beta=0.5, alpha=2), expected[0])
        assert torch.equal(torch.addmm(c, a, b), expected[1])  # a matrix, not a bias
    assert not computed


def test_a_torch_without_onednn_is_left_as_it_is(monkeypatch, computed):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with onednn_products():
        drawn(256, 256) @ drawn(256, 256)
    assert not computed
