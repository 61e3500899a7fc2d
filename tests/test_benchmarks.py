"""The benchmarks' opponent is the method; a ratio is stated only of a machine at rest."""

import itertools
from argparse import Namespace

import plain
import pytest
import torch
from tiny import PAPER, difference, experiment, shifted

from benchmarks import growth, published, speed

TINY = speed.Row(tasks=2, samples=6, layers=2, seconds=0)
ARGS = Namespace(width=64, batch=4, device="cpu", commit="abc")


@pytest.mark.parametrize(
    "variant", [{}, {"ridge": 1e-3, "task_weights": "uniform"}, {"bias": False, "norm": False}]
)
def test_opponent_without_its_stabiliser_equals_the_numpy_version(variant, monkeypatch):
    monkeypatch.setattr(published, "STABILISER", 0.0)
    given, settings = experiment(), PAPER.but(**variant)
    expected = plain.calibrate(**given, settings=settings, paths=["encoder.layers"])
    batches = given["batches"].items()
    images = {task: torch.cat([b["pixel_values"] for b in own]) for task, own in batches}
    models = given["merged"], given["base"], given["experts"]
    assert difference(published.calibrate(*models, images, settings), expected) < 1e-8


def test_both_give_the_same_model_or_the_benchmark_stops(monkeypatch):
    monkeypatch.setattr(speed, "machine_seconds", lambda: 0.0)
    runs = speed.contestants(TINY, ARGS)
    assert len(speed.measured(runs, 0)) == 1
    honest = published.calibrate
    monkeypatch.setattr(published, "calibrate", lambda *given: shifted(honest(*given), 1, 0.01))
    with pytest.raises(AssertionError, match="the results differ by"):
        speed.measured(runs, 0)


def fake_clock(monkeypatch, seconds):
    """Return a clock that only two runs move, which take the given seconds in turns, and the runs."""
    now, seconds = [0.0], iter(seconds)

    def run():
        now[0] += next(seconds)

    for clock in ("perf_counter", "monotonic", "process_time"):
        monkeypatch.setattr(speed.time, clock, lambda: now[0])
    monkeypatch.setattr(speed, "machine_seconds", lambda: now[0])
    monkeypatch.setattr(speed, "largest_difference", lambda *_: 0.0)
    return now, [run, run]


@pytest.mark.parametrize(
    ("seconds", "most", "ratios"),
    [
        ([9, 1, 2, 1, 3, 1, 3.1, 1, 3.2, 1, 8, 1], 100, [3, 3.1, 3.2]),
        ([2, 1, 4, 1] * 9, 30, [2, 4, 2]),
    ],
)
def test_a_row_ends_when_three_ratios_are_near_or_with_its_time(seconds, most, ratios, monkeypatch):
    now, runs = fake_clock(monkeypatch, seconds)
    assert speed.measured(runs, most) == pytest.approx(ratios) and 20 < now[0] <= 30


def test_nothing_is_stated_of_a_machine_that_does_other_work(monkeypatch, tmp_path):
    now, runs = fake_clock(monkeypatch, itertools.cycle([2, 1]))
    monkeypatch.setattr(speed, "machine_seconds", lambda: 9 * speed.os.cpu_count() * now[0])
    assert speed.measured(runs, 30) == []
    monkeypatch.setattr(speed.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr("sys.argv", ["speed", "--threads=1", f"--out={tmp_path / 'speed.csv'}"])
    with pytest.raises(SystemExit, match="No ratio is stated"):
        speed.main()
    assert not any(tmp_path.iterdir())


def test_growth_is_the_slope_between_measured_sizes():
    squares = [{"size": n, "took": {"host_bytes": 3 * n**2}} for n in (1, 2, 4)]
    assert growth.exponents(squares) == {"host_bytes": 2.0}
