"""What a run is told to have cost, against torch's own counter around the whole run and against memory really taken."""

import pytest
import tiny
import torch
from families import FAMILIES, experiment
from test_rehearsal import COUNTED
from tiny import PAPER
from torch.utils.flop_counter import FlopCounterMode

import featcal
from featcal.blocks.plans import plan_for
from featcal.calibration import cost
from featcal.calibration.cost import counting

SOLVED = {  # which torch's counter leaves out as well
    torch.ops.aten.linalg_cholesky_ex: lambda left, *_, **__: left[0] ** 3 // 3,
    torch.ops.aten.cholesky_solve: lambda right, *_, **__: 2 * right[0] ** 2 * right[1],
    torch.ops.aten.linalg_solve_triangular: lambda left, right, **__: right[0] ** 2 * right[1],
}
MODELS = {"clip_vision": lambda: tiny.experiment(count=5, batch=2)}
MODELS |= {family: lambda family=family: experiment(FAMILIES[family], batch=4) for family in ("clip", "t5", "llama", "gemma2")}


@pytest.mark.parametrize("model", MODELS)
def test_the_work_of_a_run_is_counted_within_2_percent(model):
    arguments = MODELS[model]()
    with counting() as meter:
        watched = meter.watched(arguments["batches"])
        with FlopCounterMode(display=False, custom_mapping=COUNTED | SOLVED) as counted:
            featcal.calibrate(**arguments | {"batches": watched}, settings=PAPER)
        merged = arguments["merged"]
        work = meter.work(merged, plan_for(merged), PAPER)
    assert work.total == pytest.approx(counted.get_total_flops(), rel=0.02)


def test_batches_pass_the_meter_unchanged_and_each_is_counted():
    batches = {"a": [{"x": torch.ones(2, 3)}, {"x": torch.ones(2, 3)}, {"x": torch.ones(1, 3)}], "b": [{"x": torch.ones(2, 3)}]}
    with counting() as meter:
        read = {task: list(those) for task, those in meter.watched(batches).items()}
    assert all(got is given for task in batches for got, given in zip(read[task], batches[task], strict=True))
    assert sorted(meter.counts.values()) == [1, 3] and meter.first["a"] == meter.first["b"]


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


def test_a_system_that_tells_no_memory_leaves_it_open(monkeypatch, tmp_path):
    monkeypatch.setattr(cost, "STATUS", tmp_path / "status")
    monkeypatch.setattr(cost, "RESET", tmp_path / "nowhere" / "clear_refs")
    with counting() as meter:
        pass
    assert meter.host_before is None and cost.peak_host(meter.host_before) is None


def test_the_cost_of_a_run_holds_seconds_peaks_and_work():
    arguments = tiny.experiment()
    with counting() as meter:
        watched = meter.watched(arguments["batches"])
        featcal.calibrate(**arguments | {"batches": watched}, settings=PAPER)
        told = meter.cost(arguments["merged"], plan_for(arguments["merged"]), PAPER)
    assert 0 < told.seconds < 60 and told.peak_host_bytes >= 0
    assert told.flops == meter.work(arguments["merged"], plan_for(arguments["merged"]), PAPER).total


def test_a_model_that_cannot_do_without_numbers_costs_an_unknown_number_of_operations():
    arguments = tiny.experiment()
    forward = arguments["merged"].forward

    def adaptive(pixel_values):
        return forward(pixel_values[: int(pixel_values.isfinite().sum())])

    arguments["merged"].forward = adaptive
    with counting() as meter:
        list(meter.watched(arguments["batches"])["mnist"])
        assert meter.cost(arguments["merged"], plan_for(arguments["merged"]), PAPER).flops is None
