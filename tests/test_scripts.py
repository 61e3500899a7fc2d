"""The scripts behind make setup, test, verify and accept: what they let pass, and what they stop."""

import os
import subprocess
import venv
from pathlib import Path

import pytest
import torch

from reproduction.results import SCORES, write_rows
from scripts import accept, campaign, compare_results, full_size, test_parts

MODEL = {"suite": "mini", "role": "clip_b32", "pool": 8, "upstream": "average"}
MODEL |= {"method": "merged", "setting": "", "seed": ""}
CODE = {"changed deps": {"featcal/merging": "modified"}}


def results(folder, count=500, drift=1.5, **values):
    """A results folder with one model's score per task, and a file of another kind beside it."""
    more = {**MODEL, "metric": "accuracy", "count": count}
    rows = [more | {"task": task, "value": value} for task, value in values.items()]
    write_rows(folder / "mini" / "scores/clip_b32-8/scores.csv", rows, SCORES)
    drift = [{"block": "00", "l2": drift}]
    write_rows(folder / "mini/drift/clip_b32-8/drift.csv", drift, ("block", "l2"))
    return str(folder)


SCORED = {"mnist": 90.0, "dtd": 50.0, "svhn": 70.0}


@pytest.mark.parametrize(
    ("recomputed", "count", "code"),
    [
        (SCORED, 500, 0),
        (SCORED | {"mnist": 92.9}, 500, 0),  # the average moved by less than 1
        (SCORED | {"mnist": 93.1, "dtd": 49.9}, 500, 1),  # one task by more than 3
        ({task: value + 1.1 for task, value in SCORED.items()}, 500, 1),  # the average by more
        ({"mnist": 90.0, "dtd": 50.0}, 500, 1),  # a task is missing
        (SCORED | {"mnist": 95.9}, 125, 0),  # a quarter of the answers: twice as much
        (SCORED | {"mnist": 96.1}, 125, 1),
    ],
)
def test_scores_pass_within_one_of_the_mean_and_three_of_a_task(tmp_path, recomputed, count, code):
    committed = results(tmp_path / "committed", count, **SCORED)
    other = results(tmp_path / "recomputed", count, **recomputed)
    assert compare_results.main([committed, other]) == code


def test_columns_of_other_files_pass_within_a_tenth_and_every_file_is_on_both_sides(tmp_path):
    committed = results(tmp_path / "committed", mnist=90.0)
    for drift, code in ((1.6, 0), (1.4, 0), (1.7, 1), (1.3, 1)):
        recomputed = results(tmp_path / "recomputed", drift=drift, mnist=90.0)
        assert compare_results.main([committed, recomputed]) == code
    recomputed = results(tmp_path / "recomputed", mnist=90.0)
    (Path(recomputed) / "mini/drift/clip_b32-8/drift.csv").unlink()
    assert compare_results.main([committed, recomputed]) == 1
    (tmp_path / "empty").mkdir()
    assert compare_results.main([str(tmp_path / "empty")] * 2) == 1


def test_parts_end_with_what_failed_and_pytest_s_exit_code(tmp_path, monkeypatch, capfd):
    for name in test_parts.ENVIRONMENT:
        monkeypatch.setenv(name, "")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q -p no:cacheprovider\n")
    (tmp_path / "below").mkdir()
    for place, name, value in ((".", "right", True), ("below", "wrong", False)):
        text = f"def test_{name}():\n    assert {value}\n"
        (tmp_path / place / f"test_{name}.py").write_text(text)
    parts = [str(tmp_path), str(tmp_path / "below")]
    assert test_parts.main(["--jobs", "2", *parts]) == 1
    printed = capfd.readouterr().out
    assert "1 passed" in printed and "1 failed" in printed
    assert "test_wrong" in printed and "test_right" not in printed
    assert test_parts.main(parts[:1]) == 1 and test_parts.main([f"{tmp_path}/test_right.py"]) == 0


def test_stages_with_changed_code_alone_may_be_recorded_and_pages_are_left_to_be_made_again():
    status = {
        "merge@a": [CODE],
        "page@table01": [{"changed deps": {"notebooks/table01.ipynb": "modified"}}],
        "page_method": [{"changed deps": {"featcal/core": "modified"}}],
        "book": [{"changed outs": {"book/_build/html": "deleted"}}],
    }
    assert accept.only_code_changed(status) == ["merge@a"]


@pytest.mark.parametrize(
    "entry",
    [
        {"changed deps": CODE["changed deps"] | {"params.yaml": {"merge.a.mini": "modified"}}},
        {"changed deps": {"reproduction/mini/models/clip_b32": "modified"}},
        {"changed deps": {"outputs/mini/data": "modified"}},
        {"changed outs": {"results/mini/scores/clip_b32-8/scores.csv": "modified"}},
        "changed command",
    ],
)
def test_a_stage_that_differs_by_more_than_its_code_is_refused_by_name(entry):
    with pytest.raises(accept.Refused, match="merge@a"):
        accept.only_code_changed({"merge@a": [CODE, entry]})


def test_other_bytes_of_the_smoke_graph_stop_the_acceptance():
    before = {"a": "1", "b": "2"}
    for after in (before | {"b": "3"}, {"a": "1"}, before | {"c": "4"}):
        with pytest.raises(accept.Refused, match="  [bc]"):
            accept.require_same(before, after)
    with pytest.raises(accept.Refused):  # a graph that wrote nothing proves nothing
        accept.require_same({}, {})


def test_the_families_in_the_book_are_what_becomes_of_them():
    """Each is merged, calibrated and measured, or refused by one message."""
    verdicts = {name: campaign.verdict_of(run)[0] for name, (run, _) in campaign.families().items()}
    assert set(verdicts.values()) == {campaign.OK, campaign.NAMED}, verdicts
    lines = (Path(__file__).parents[1] / "book/families.md").read_text().splitlines()
    table = campaign.matrix(verdicts)
    assert [line.strip() for line in lines if line.strip() in table] == table


SCRIPT = Path(__file__).parents[1] / "scripts" / "repair_torchvision.py"
TORCH = """
class library:
    class Library:
        declared = []
        def __init__(self, name, kind):
            assert (name, kind) == ("torchvision", "FRAGMENT")
        def define(self, schema):
            self.declared.append(schema.partition("(")[0])
"""
NEEDS_OPERATORS = """
import torch
from . import operators
for name in ("nms", "qnms"):
    if name not in torch.library.Library.declared:
        raise RuntimeError(f"operator torchvision::{name} does not exist")
"""


@pytest.fixture
def environment(tmp_path):
    """An environment with a torch, and the .pth file that earlier versions left there."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "torch.py").write_text(TORCH)
    (site / "featcal_torchvision_mend.pth").write_text("raise SystemExit('an old hook')\n")
    return site


def python(site, *words):
    """Run the environment's Python; a PYTHONPATH would show it another torch."""
    command = [site.parents[2] / "bin" / "python", *words]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


@pytest.mark.parametrize(
    ("code", "before", "left", "after"),
    [
        (NEEDS_OPERATORS, "does not exist", ["_torchvision_operators"], ""),
        ("import torch", "", [], ""),
        ("raise RuntimeError('another fault')", "another fault", [], "another fault"),
        (None, "No module", [], "No module"),
    ],
)
def test_only_a_torchvision_without_operators_is_mended(environment, code, before, left, after):
    if code:
        (environment / "torchvision").mkdir()
        (environment / "torchvision/__init__.py").write_text(code)
        (environment / "torchvision/operators.py").write_text("")
    load = "import sys; assert 'torch' not in sys.modules; import torchvision"
    assert before in python(environment, "-c", load).stderr
    for _ in range(2):
        done = python(environment, SCRIPT)
        assert done.returncode == 0, done.stderr
    assert sorted({path.stem for path in environment.glob("*torchvision_*")}) == left
    stderr = python(environment, "-c", load).stderr
    assert after in stderr and bool(after) == bool(stderr)


BRIEF = {"samples": 6, "tasks": ("mnist", "dtd")}
TEXT = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_heads": 4, "num_layers": 1}
TEXT |= {"num_decoder_layers": 1, "vocab_size": 64}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
VISION |= {"num_attention_heads": 2, "image_size": 64}


@pytest.mark.parametrize(
    "size", [full_size.vision(**VISION), full_size.text(**TEXT)], ids=["vision", "text"]
)
def test_both_architectures_are_built_merged_and_calibrated(size):
    took = full_size.calibrated(size, "cpu", **BRIEF)
    assert took.merge > 0 and took.calibration > 0 and took.peak == 0
    assert 0 < took.last.relative_drift < 1


def test_full_sizes_are_those_of_the_papers_models():
    with torch.device("meta"):
        vision, text = full_size.vision().build(), full_size.text().build()
    assert sum(p.numel() for p in vision.parameters()) == 87_456_000
    # the published count; this version ties the head of a new model to its embeddings, which the
    # published one does not
    assert sum(p.numel() for p in text.parameters()) + 32128 * 768 == 247_577_856


def test_without_a_gpu_it_says_that_it_needs_one(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert full_size.report() == 2 and "needs a CUDA GPU" in capsys.readouterr().out
