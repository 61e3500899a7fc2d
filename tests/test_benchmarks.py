"""Both versions in each benchmark agree at tiny sizes, and their helpers are right."""

from argparse import Namespace
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from processes import Program, run_program
from test_calibrate import plain_result
from tiny import PAPER, experiment, shifted
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import (
    beyond,
    block,
    calibrate,
    evaluate,
    growth,
    measure,
    neighbours,
    padding,
    plain_version,
    solve,
)
from featcal.settings import Calibration

TINY = {"tasks": 2, "samples": 6, "layers": 2, "width": 64, "batch": 4, "repeats": 1, "warm": 1}
TINY |= {"device": "cpu", "threads": 1, "opponent": "plain"}


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize(
    "variant", [{}, {"ridge": 1e-3, "task_weights": "uniform"}, {"bias": False, "norm": False}]
)
def test_opponents_of_the_benchmarks_equal_the_numpy_version(variant, published, monkeypatch):
    # without the stabiliser the published form equals the paper's
    monkeypatch.setattr(plain_version, "STABILISER", 0.0)
    given, settings = experiment(), PAPER.but(**variant)
    expected = plain_result(given, settings)
    images = {
        task: torch.cat([b["pixel_values"] for b in batches])
        for task, batches in given["batches"].items()
    }
    models = given["merged"], given["base"], given["experts"]
    model = plain_version.calibrate(*models, images, settings, published)
    for name, p in model.named_parameters():
        ours = p.detach().numpy()
        np.testing.assert_allclose(ours, expected[name], err_msg=name, rtol=1e-8, atol=1e-8)


def test_both_give_the_same_block():
    _, difference = block.compare(width=64, tasks=2, samples=20, batch=8, repeats=1)
    assert 0 < difference < block.TOLERANCE


@pytest.mark.parametrize("how", [{}, {"opponent": "published"}])
def test_both_give_the_same_model_in_memory(how):
    pairs, difference = calibrate.compare(Namespace(**TINY | how))
    assert 0 < difference < block.TOLERANCE
    assert len(pairs) == TINY["repeats"]


@pytest.fixture
def forked(tmp_path, monkeypatch):
    """The processes of the benchmarks' own programs, forked where everything is imported."""
    run = partial(run_program, printed=tmp_path / "printed")
    for module in (calibrate, growth):
        monkeypatch.setattr(module.subprocess, "run", run)


def test_both_write_the_same_model_from_folder_to_folder(tmp_path, capsys, forked):
    pairs = calibrate.in_children(Namespace(**TINY, folders=1), tmp_path)
    assert len(pairs) == 1
    assert all(one[field] > 0 for one in pairs[0] for field in ("bytes", "clock", "processor"))
    calibrate.print_folders(pairs, "cpu")
    said = capsys.readouterr().out
    assert said.count("folder to folder") == 3 and "peak host memory" in said


def test_a_benchmark_stops_where_the_results_differ(monkeypatch):
    honest = plain_version.calibrate
    monkeypatch.setattr(plain_version, "calibrate", lambda *given: shifted(honest(*given), 1, 0.01))
    with pytest.raises(AssertionError, match="the results differ by"):
        calibrate.compare(Namespace(**TINY))


def test_both_give_the_same_answers_to_the_same_pictures(tmp_path, monkeypatch):
    args = Namespace(samples=10, width=64, layers=1, image=64, batch=4, repeats=1, device="cpu")
    assert {len(pairs) for pairs in evaluate.compare(tmp_path / "first", args).values()} == {1}
    honest = evaluate.mapped_images

    def shuffled(*given):
        return replace(honest(*given), labels=honest(*given).labels[::-1].copy() * 0 + 9)

    monkeypatch.setattr(evaluate, "mapped_images", shuffled)
    with pytest.raises(AssertionError, match="the results differ"):
        evaluate.compare(tmp_path / "second", args)


def test_both_solve_the_same_site():
    _, difference = solve.compare(d=96, outputs=(96, 96), repeats=1)
    assert 0 < difference < solve.TOLERANCE


def test_texts_of_like_length_compute_nothing_but_their_tokens():
    reader, lengths = padding.LengthReader(), [3, 7, 3, 7, 7, 3]
    found = padding.shares(lengths, range(6), reader, 3)
    assert found["of like length"] == 1  # three of 7 and three of 3
    assert found["as drawn"] == 42 / 30  # each batch has a 7
    drawn = padding.shares(padding.drawn_lengths(256, 1), range(256), reader, 32)
    assert drawn["of like length"] < 1.3 < 2 < drawn["as drawn"]


def test_growth_measures_memory_next_to_the_plan(tmp_path, forked):
    args = Namespace(**TINY | {"samples": 8, "threads": 1, "clock": 0, "width": 128})
    point = growth.measured(args, tmp_path)
    assert point["took"].keys() == point["planned"].keys() == {"host_bytes"}
    assert min(point["took"]["host_bytes"], point["planned"]["host_bytes"]) > 0
    squares = [{"size": n, "took": {"host_bytes": 3 * n**2}} for n in (1, 2, 4)]
    assert growth.exponents(squares) == {"host_bytes": 2.0}


def test_a_job_next_to_another_writes_the_same(tmp_path, monkeypatch):
    """The first, which warms up, is the command itself; those that follow are forked."""
    args = Namespace(**TINY | {"policies": "passive", "next_to": "1", "tasks": 1})
    neighbours.prepare(args, tmp_path)
    begun = []

    def start(command, **options):
        begun.append(command)
        if len(begun) == 1:
            return popen(command, **options)
        return Program(command[1:], options["cwd"], tmp_path / f"told{len(begun)}")

    popen = neighbours.subprocess.Popen
    monkeypatch.setattr(neighbours.subprocess, "Popen", start)
    slow_downs = [(name, count) for name, count, _ in neighbours.slow_downs(args, tmp_path)]
    assert slow_downs == [("passive", 1)]


def test_solutions_are_near_the_tall_least_squares_problem_and_ours_the_nearest():
    errors = solve.precision(d=64, o=16, tokens=1024)
    assert all(ours < plain for plain, ours in errors.values())
    assert errors[0.05][1] < 1e-6 and errors[1e-5][1] < 1e-3


def test_peak_memory_counts_what_was_freed_again():
    before = measure.memory("VmHWM")
    extra = torch.ones(before - measure.memory("VmRSS") + 64 * measure.MIB, dtype=torch.uint8)
    del extra
    assert measure.memory("VmHWM") > before


def test_every_variant_beyond_the_paper_gives_another_model():
    args = Namespace(**TINY)
    paper = beyond.runs(args, beyond.PAPER)().model.state_dict()
    for name, settings in beyond.variants().items():
        own = beyond.runs(args, settings)().model.state_dict()
        assert any(not torch.equal(own[key], value) for key, value in paper.items()), name
