"""How much each token counts, and that float32 products with float64 sums are enough."""

from contextlib import suppress

import pytest
import torch
from tiny import seeded

from featcal.core.moments import Drift, Moments, token_weights
from featcal.core.precision import exact_products
from featcal.core.ridge import RidgeSystem, solve_ridge, task_system
from featcal.errors import BadSetting

RULES = [lambda name: 1, lambda *_: 1.0, lambda *_: torch.ones(2, 4)]
RULES += [lambda *_: -torch.ones(2, 5), lambda *_: torch.full((2, 5), torch.nan)]


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_gives_no_weights_of_the_tokens_is_refused(rule):
    with pytest.raises(BadSetting, match=r"calibrate\.token_weights.*must be a function.*finite"):
        token_weights(rule, "mlp.fc1", True, torch.zeros(2, 5, 3), None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_drift_of_features_in_half_precision_is_that_of_their_values(dtype):
    h, h_exp = torch.randn(2, 5, 64, generator=seeded(0)).mul(40).to(dtype)
    drift, exact = Drift(), Drift()
    drift.add(h, h_exp)
    exact.add(h.double(), h_exp.double())
    assert drift.relative == pytest.approx(exact.relative, rel=1e-5)
    assert drift.cosine == pytest.approx(exact.cosine, abs=1e-6)


WIDTH, OUTPUTS, TOKENS = 128, 16, 4096


def power_law(seed):
    """Features whose energy falls off as a power law, around one dominant mean, in float32."""
    g = seeded(seed)
    spectrum = torch.arange(1, WIDTH + 1, dtype=torch.float64) ** -1.2
    Q = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=g, dtype=torch.float64))[0]
    x = (torch.randn(TOKENS, WIDTH, generator=g, dtype=torch.float64) * spectrum) @ Q.T
    W = torch.randn(OUTPUTS, WIDTH, generator=g, dtype=torch.float64) / WIDTH**0.5
    return (x + 3 * Q[:, 0]).float(), W


def solved(dtype, ridge):
    total, ones = RidgeSystem.zero(WIDTH, OUTPUTS), torch.ones(512, dtype=dtype)
    for seed in range(3):
        x, W = power_law(seed)
        moments = Moments.zero(WIDTH)
        for rows in x.to(dtype).split(512):
            moments.add(rows, rows, ones)
        total += task_system(moments, W, torch.zeros(OUTPUTS), 0.3)
    A = torch.randn(OUTPUTS, WIDTH, generator=seeded(7), dtype=torch.float64) / WIDTH**0.5
    return solve_ridge(total, A, torch.zeros(OUTPUTS), ridge).weight


@pytest.mark.parametrize(("ridge", "bound"), [(3.0, 1e-6), (0.05, 1e-6), (1e-5, 1e-3)])
def test_float32_products_cost_little_at_the_papers_ridges(ridge, bound):
    exact = solved(torch.float64, ridge)
    assert (solved(torch.float32, ridge) - exact).norm() / exact.norm() < bound


CUDNN, CUDA, MKLDNN = torch.backends.cudnn, torch.backends.cuda.matmul, torch.backends.mkldnn
NEWER = (CUDNN.conv, CUDNN.rnn, CUDA, MKLDNN.matmul, MKLDNN.conv)
SWITCHES = [("high", True), ("highest", False), ("medium", True), (CUDNN.conv, "ieee")]
SWITCHES += [(CUDA, "tf32"), (MKLDNN.matmul, "bf16"), (torch.backends, "tf32")]


def precisions():
    """What the switches say; older ones cannot be read where a newer one contradicts them."""
    read = [part.fp32_precision for part in NEWER]
    for older in (torch.get_float32_matmul_precision, lambda: CUDNN.allow_tf32):
        with suppress(RuntimeError):
            read.append(older())
    return read


@pytest.mark.parametrize("own", SWITCHES, ids=str)
def test_tf32_is_off_inside_and_restored_after_an_exception(own):
    before = precisions()
    if isinstance(own[0], str):
        torch.set_float32_matmul_precision(own[0])
        CUDNN.allow_tf32 = own[1]
    else:
        own[0].fp32_precision = own[1]
    changed = precisions()
    try:
        with pytest.raises(KeyError), exact_products():
            assert precisions() == ["ieee"] * 5 + ["highest", False] and not CUDA.allow_tf32
            raise KeyError
        assert changed != before and precisions() == changed
    finally:
        torch.backends.fp32_precision = "none"
        torch.set_float32_matmul_precision(before[5])
        CUDNN.allow_tf32 = before[6]
        for part, value in zip(NEWER, before, strict=False):
            part.fp32_precision = value
    assert precisions() == before


def half_moments(dtype, device="cpu", w=None, data=torch.bfloat16):
    """Sums of moments of half-precision data passed as `dtype`, plain and folded."""
    x, y = torch.randn(2, 300, 130, generator=seeded(1)).to(data).to(device)
    w = torch.ones(300, device=device) if w is None else w.to(device)
    plain, folded = Moments.zero(130, device=device), Moments.zero(130, 20, device)
    plain.add(x.to(dtype), y.to(dtype), w)
    folded.add(x.to(dtype), y.to(dtype), w, y[:, :20].float() / 3)
    return [t for m in (plain, folded) for t in vars(m).values() if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("data", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", ["ones", "zeros and ones", "all"])
def test_moments_of_half_precision_equal_those_of_the_same_values_in_float32(data, weights):
    w = torch.rand(300, generator=seeded(2))
    w = {"ones": torch.ones(300), "zeros and ones": (w > 0.5).float(), "all": w}[weights]
    both = [half_moments(dtype, w=w, data=data) for dtype in (data, torch.float32)]
    for half, single in zip(*both, strict=True):
        assert half.dtype == torch.float64 and torch.equal(half, single)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_products_of_half_precision_on_a_gpu_equal_those_in_float32():
    with exact_products():
        both = [half_moments(dtype, "cuda") for dtype in (torch.bfloat16, torch.float32)]
    for half, single in zip(*both, strict=True):
        assert half.dtype == torch.float64
        torch.testing.assert_close(half, single, rtol=1e-5, atol=1e-5 * float(single.abs().max()))
