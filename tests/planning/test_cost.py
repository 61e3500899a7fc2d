"""What a run is told to have cost, against torch's own counter around the whole run and against
memory really taken.
"""

from dataclasses import replace

import pytest
import tiny
import torch
from families import FAMILIES, experiment
from test_rehearsal import COUNTED
from test_resume import deep, killed_behind
from tiny import PAPER
from torch.utils.flop_counter import FlopCounterMode

import featcal
from featcal.planning import cost
from featcal.planning.cost import counting
from featcal.settings import Calibration

SOLVED = {  # which torch's counter leaves out as well
    torch.ops.aten.addmm_: lambda _, left, right, **__: 2 * left[0] * left[1] * right[1],
    torch.ops.aten.linalg_cholesky_ex: lambda left, *_, **__: left[0] ** 3 // 3,
    torch.ops.aten._grouped_mm: lambda left, right, *_, **__: (
        2 * left[0] * left[1] * right[-1]
    ),  # a mixture's own experts
    torch.ops.aten.linalg_solve_triangular: lambda left, right, **__: right[0] ** 2 * right[1],
}
MODELS = {"clip_vision": lambda **more: tiny.experiment(count=5, batch=2, **more)}
MODELS |= {
    f: lambda f=f, **more: experiment(FAMILIES[f], batch=4, **more)
    for f in ("clip", "t5", "llama", "gemma2", "gpt2")
}


class Torchs(FlopCounterMode):
    """Torch's own counter, which doubles the time of a run."""

    def __init__(self):
        super().__init__(display=False, custom_mapping=COUNTED | SOLVED)

    flops = property(FlopCounterMode.get_total_flops)


def counted(by=Torchs, **arguments):
    """The result of a run, and the operations counted around it until the run's own count began."""
    until = []
    with by() as counter, pytest.MonkeyPatch.context() as patched:
        rehearse = cost.done
        patched.setattr(
            cost, "done", lambda *given: until.append(counter.flops) or rehearse(*given)
        )
        result = featcal.calibrate(**arguments)
    return result, until[0]


@pytest.mark.parametrize("model", MODELS)
def test_the_work_of_a_run_is_counted_within_2_percent(model):
    result, true = counted(**MODELS[model](), settings=PAPER)
    assert result.cost.flops == pytest.approx(true, rel=0.02)


def test_the_work_of_other_settings_is_counted_within_2_percent():
    settings = Calibration(
        ridge=0.05, anchor_blend=2.0, interpolation=0.3, norm=False, order="stale"
    )
    result, true = counted(**MODELS["clip_vision"](), settings=settings)
    assert result.cost.flops == pytest.approx(true, rel=0.02)


@pytest.mark.parametrize("model", ["clip_vision", "clip", "t5"])
def test_the_work_without_the_drift_of_blocks_is_counted_within_2_percent(model):
    (told, with_drift), (left, without) = (
        counted(**MODELS[model](), settings=PAPER, block_drift=b) for b in (True, False)
    )
    assert left.cost.flops == pytest.approx(without, rel=0.02)
    assert (
        told.cost.flops - left.cost.flops == pytest.approx(with_drift - without, rel=0.02)
        and with_drift > without
    )


BEYOND = {
    "sites": {"order": "sites"}, "residual": {"residual": 1.0}, "residual and sites": {"residual": 1.0, "order": "sites"},
    "prior": {"prior": 0.1}, "joint": {"affine": "joint"},
    "all": {"residual": 1.0, "order": "sites", "affine": "joint", "prior": 0.1}}  # fmt: skip


@pytest.mark.parametrize("model", ["clip_vision", "t5", "bert"])
@pytest.mark.parametrize("more", BEYOND)
def test_the_work_of_what_goes_beyond_the_paper_is_counted_within_3_percent(model, more):
    given = experiment(FAMILIES["bert"], batch=4) if model == "bert" else MODELS[model]()
    by = (
        Torchs if (model, more) == ("bert", "all") else CountedOperations
    )  # which uses torch's formulas and is much quicker
    result, true = counted(by, **given, settings=PAPER.but(**BEYOND[more]))
    assert result.cost.flops == pytest.approx(true, rel=0.03)


def test_rows_that_a_rule_leaves_out_are_not_counted():
    def class_token_alone(module, last, shape):
        w = torch.zeros(shape)
        w[..., 0] = 1
        return w

    result, true = counted(
        **MODELS["clip_vision"](), settings=PAPER, token_weights=class_token_alone
    )
    assert result.cost.flops == pytest.approx(true, rel=0.02)


def test_half_precision_counts_the_products_it_computes_anew():
    result, true = counted(**MODELS["clip_vision"](dtype=torch.bfloat16), settings=PAPER)
    assert result.cost.flops == pytest.approx(true, rel=0.02)


def test_a_resumed_run_counts_what_it_did_itself(tmp_path, monkeypatch):
    arguments = tiny.experiment(torch.float32, build=deep)
    killed_behind(monkeypatch, 2, tmp_path / "out", arguments)
    result, true = counted(**arguments, settings=PAPER, out=tmp_path / "out")
    assert result.cost.flops == pytest.approx(true, rel=0.02)
    assert result.cost.flops < 0.8 * featcal.calibrate(**arguments, settings=PAPER).cost.flops


def test_memory_taken_and_given_back_inside_is_told_to_within_a_hundredth():
    torch.ones(10)
    with counting() as meter:
        block = torch.ones(25 << 20, dtype=torch.float32)
        del block
        peak = cost.peak_host(meter.host_before)
    assert peak == pytest.approx(100 << 20, rel=0.01)


def test_a_second_run_does_not_tell_the_peak_of_the_first():
    with counting():
        block = torch.ones(25 << 20, dtype=torch.float32)
        del block
    with counting() as meter:
        torch.ones(10)
    assert cost.peak_host(meter.host_before) < 10 << 20


def test_a_model_that_cannot_do_without_numbers_costs_an_unknown_number_of_operations():
    arguments = tiny.experiment()
    entry = type(arguments["merged"]).forward

    class Adaptive(type(arguments["merged"])):
        def forward(self, pixel_values, **more):
            return entry(self, pixel_values * min(1.0, float(pixel_values.abs().sum())), **more)

    for model in (arguments["merged"], arguments["base"], *arguments["experts"].values()):
        model.__class__ = Adaptive
    result = featcal.calibrate(**arguments, settings=PAPER)
    assert result.cost.flops is None and len(result.blocks) == 2
