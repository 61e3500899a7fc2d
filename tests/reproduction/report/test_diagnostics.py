"""Figures 2, 6 and 7: cosines and gains by hand, task vectors of small modules, and drawings of
invented results and of none.
"""

import math

import pandas as pd
import pytest
import torch
from synthetic_correct import forget_answers
from synthetic_results import TASKS, write_project
from torch import nn

from reproduction.report import diagnostics
from reproduction.report.claims import claims
from reproduction.report.evidence import Evidence
from reproduction.report.gains import apart, correlation, gains, together
from reproduction.report.page import Page
from reproduction.report.statistics import estimate
from reproduction.report.verdicts import judge
from reproduction.results import SCORES, read_rows, write_rows
from reproduction.stages.final_features import (
    alignment_row,
    evenly,
    projection_rows,
    similarity_rows,
)
from reproduction.stages.task_vectors import parameter_groups, task_vector_alignment

SURGERY, FEATCAL = (
    {"upstream": "task_arithmetic", "method": m, "setting": "suite"} for m in ("surgery", "featcal")
)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Invented results, with ProbSurgery one point above Surgery everywhere."""
    file = forget_answers(write_project(tmp_path)) / "scores/clip_b32-8/scores.csv"
    scores = read_rows(file, SCORES)
    rival = [
        row | {"method": "prob_surgery", "value": row["value"] + 1}
        for row in scores
        if row["method"] == "surgery"
    ]
    write_rows(file, [*scores, *rival], SCORES)
    monkeypatch.chdir(tmp_path)
    return Evidence("mini", "clip_b32", "8")


def linear(values):
    module = nn.Sequential(nn.Linear(2, 1, bias=False))
    module[0].weight.data = torch.tensor([values])
    return module


def test_a_task_vector_is_the_change_from_the_base_and_not_the_parameter():
    base, expert, model = linear([5.0, 5.0]), linear([8.0, 9.0]), linear([5.0, 7.0])
    cosine, length = task_vector_alignment(model, base, expert, ["0.weight"])
    assert (cosine, length) == (pytest.approx(4 / 5), pytest.approx(2 / 5))  # (0, 2) against (3, 4)


def test_without_a_change_there_is_no_direction():
    base = linear([1.0, 2.0])
    assert math.isnan(task_vector_alignment(base, base, linear([2.0, 2.0]), ["0.weight"])[0])


def test_calibrated_weights_are_the_linears_inside_blocks():
    from tiny import clip

    groups = parameter_groups(clip())
    assert set(groups["linear"]) < set(groups["backbone"])
    assert all(
        ".weight" in name and "layers" in name and "norm" not in name for name in groups["linear"]
    )
    assert len(groups["linear"]) % 6 == 0, "q, k, v, out, fc1 and fc2 of every block"


def test_the_row_of_a_task_is_the_mean_of_its_images():
    draw = torch.Generator().manual_seed(3)
    features, expert = (
        torch.nn.functional.normalize(torch.randn(7, 4, generator=draw), dim=-1) for _ in range(2)
    )
    line = {"task": "t", "method": "merged", "setting": ""}
    single = [row["similarity"] for row in similarity_rows(line, features, expert)]
    whole = alignment_row(line, features, expert)
    by_hand = [float(a @ b) for a, b in zip(features, expert, strict=True)]
    assert single == pytest.approx(by_hand) and whole["cosine"] == pytest.approx(sum(by_hand) / 7)
    assert whole["cosine_sd"] == pytest.approx(pd.Series(by_hand).std())
    assert whole["l2"] == pytest.approx(
        sum(math.sqrt(2 - 2 * cosine) for cosine in by_hand) / 7, rel=1e-5
    )


def test_images_are_taken_evenly_from_a_sorted_data_set():
    assert evenly(4, 10) == [0, 1, 2, 3]
    assert evenly(1000, 4) == [0, 250, 500, 750]
    assert len(set(evenly(10_001, 500))) == 500


def test_all_models_of_a_task_share_their_plane():
    draw = torch.Generator().manual_seed(4)
    expert = torch.randn(30, 6, generator=draw)
    shift = torch.zeros(6)
    shift[2] = 9.0
    rows = list(
        projection_rows(
            "t", torch.arange(30), {"expert": expert, "merged": expert + shift, "featcal": expert}
        )
    )
    places = {
        model: [(r["x"], r["y"]) for r in rows if r["model"] == model]
        for model in ("expert", "merged", "featcal")
    }
    assert places["expert"] == places["featcal"]
    moved = {
        (round(m[0] - e[0], 4), round(m[1] - e[1], 4))
        for e, m in zip(places["expert"], places["merged"], strict=True)
    }
    assert len(moved) == 1 and math.hypot(*moved.pop()) == pytest.approx(9, rel=0.05)


def test_the_error_of_a_mean_cosine_comes_from_its_images(project):
    rows = project.table("alignment")
    one = rows[(rows["method"] == "merged") & (rows["task"] == "dtd")]
    assert estimate(one, "cosine").variance == pytest.approx(0.05**2 / 500)
    every = rows[rows["method"] == "merged"]
    assert estimate(every, "cosine").variance == pytest.approx(0.05**2 / 500 / len(TASKS))


def test_gains_are_those_of_the_seed_that_was_measured(project):
    found = gains(project, FEATCAL, SURGERY).set_index("task")
    assert list(found.index) == TASKS
    assert found.loc["sun397", "cosine"] == pytest.approx(0.84 - 0.74)
    assert found.loc["dtd", "cosine"] == pytest.approx(0.84 - 0.74 - 0.02 * 7)
    assert found["accuracy"].tolist() == pytest.approx([10.0] * len(TASKS))
    assert math.isnan(correlation(found["cosine"], found["accuracy"])[0]), (
        "accuracy gains are all alike"
    )
    assert together(found)[0] == "within noise"
    assert gains(project, FEATCAL, {**SURGERY, "method": "nobody"}).empty


@pytest.mark.parametrize(("slope", "word"), [(50, "holds"), (-50, "does not hold")])
def test_gains_go_together_where_they_lie_on_a_rising_line(slope, word):
    cosine = [0.0, 0.1, 0.2, 0.3, 0.4]
    found = pd.DataFrame(
        {"cosine": cosine, "accuracy": [slope * c + (i % 2) for i, c in enumerate(cosine)]}
    )
    assert together(found)[0] == word
    assert together(found.head(3))[0] == "within noise"


@pytest.mark.parametrize(
    ("accuracy", "word"), [(9.0, "holds"), (2.0, "within noise"), (-1.0, "does not hold")]
)
def test_a_gain_comes_without_the_other_where_one_rises_as_the_other_falls(project, accuracy, word):
    noises = {"cosine_noise": 0.01, "accuracy_noise": 5.0}
    rows = [
        {"task": "dtd", "cosine": -0.05, "accuracy": accuracy},
        {"task": "mnist", "cosine": 0.05, "accuracy": 9.0},
    ]
    assert apart(pd.DataFrame([row | noises for row in rows]), project)[0] == word


def test_the_claims_of_the_diagnostics_are_answered_from_their_own_files(project):
    chosen = [c for c in claims() if c.place in ("figure2", "figure6", "figure7")]
    words = {c.id: judge(c, "mini", "suite", project.folder).word for c in chosen}
    assert words == {
        "f2_macro": "holds", "f2_shown": "holds", "f2_together": "within noise", "f2_apart": "holds", "f2_vectors": "one run",
        "f6_nearer": "one run", "f7_macro": "holds", "f7_shown": "holds", "f7_every_task": "holds", "f7_apart": "does not hold",
    }  # fmt: skip


@pytest.mark.parametrize("page", diagnostics.RIVALS)
@pytest.mark.parametrize("panel", diagnostics.PANELS)
def test_a_panel_is_drawn_from_results_and_says_so_without(project, panel, page):
    assert "not run" in diagnostics.figure(panel, Page(page, "paper")).text
    drawn = diagnostics.PANELS[panel](project, diagnostics.RIVALS[page])
    assert drawn is not None and all(axes.get_xlabel() for axes in drawn.axes)


def test_panel_a_shows_the_cosines_of_the_table(project):
    axes = diagnostics.alignment(project, "surgery").axes[0]
    drawn = {
        dots.get_label(): [float(x) for x in dots.get_offsets()[:, 0]] for dots in axes.collections
    }
    values = [0.74 + 0.02 * i for i in range(len(TASKS))]
    assert drawn["Surgery"] == pytest.approx([*values, sum(values) / len(values)])
