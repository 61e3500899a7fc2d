"""Calibration or extrapolation, on invented results whose differences are known."""

import math
import shutil
from itertools import product
from statistics import variance

import pytest
from synthetic_correct import write_answers

from featcal.files import write_json
from pipeline import ROOT, read_rows
from reproduction.report.evidence import Evidence, select
from reproduction.report.pages import extrapolation
from reproduction.report.statistics import bits
from reproduction.results import EXTRAPOLATION

BLENDS = {1.0: 0.0, 8.0: 6.0}  # what ρ adds
ORDERS = {"forward": 64.0, "sites": 65.0}
TASKS = ("mnist", "dtd")


@pytest.fixture
def study(results):
    """Two tasks of 400 samples; the anchor has 60 and loses 20 at the larger ρ."""
    shutil.rmtree(results / "sweep")
    folder = results / "extrapolation/clip_b32-8"
    models = [("anchor", "", 0.3, 1, 1e9, 60.0), ("anchor", "", 0.3, 8, 1e9, 40.0)]
    for (order, value), alpha, (rho, more) in product(ORDERS.items(), (0.3, 1), BLENDS.items()):
        models.append(("cell", order, alpha, rho, 0.01, value + more))
    models += [("stream", "", 1, 8, "", 72.0), ("alone", "", 0.3, 2, 0.05, 66.0)]
    for name in extrapolation.PARTS:
        models += [("alone", name, 0.3, 2, 0.05, 67.0), ("left out", name, 1, 8, 0.05, 69.0)]
    for place, value in zip(extrapolation.PLACES, (64, 69, 65, 69.5, 70), strict=True):
        models.append(("spectrum", place, 0.3, 8, 0.01, float(value)))
    shared = {"suite": "mini", "role": "clip_b32", "pool": 8, "upstream": "task_arithmetic"}
    shared |= {"method": "featcal", "setting": "", "metric": "accuracy", "seed": 42, "count": 400}
    names = ("choice", "variant", "interpolation", "anchor_blend", "ridge", "value")
    rows = [
        shared | dict(zip(names, model, strict=True)) | {"task": task, "divergence": 0.25}
        for model in models
        for task in TASKS
    ]
    write_answers(folder / "extrapolation.csv", rows, EXTRAPOLATION)
    settings = {"orders": list(ORDERS), "interpolations": [0.3, 1.0], "blends": list(BLENDS)}
    below = {"0.01": {"directions": 0.9, "energy": 0.05, "change": 0.6}}
    facts = {"study": settings, "below": below, "stream_blend": 8.0}
    write_json(folder / "extrapolation.settings.json", facts)
    return folder


def line(page, start):
    """Return the cells of the line of a table that begins with some words."""
    return next(one for one in page.text.splitlines() if one.startswith(start)).split("  ")


def test_gains_of_rho_and_over_the_merged_model_are_paired_over_samples(study):
    page = extrapolation.by_order("mini")
    cells = line(page, "site by site, α 0.3")
    assert cells[2:6] == ["65.0", "λ 0.01, KL 0.25", "71.0", "λ 0.01, KL 0.25"]
    rows = read_rows(study / "extrapolation.correct.csv")
    right = {}
    for row in rows:
        named = (row["choice"], row["variant"], row["interpolation"], float(row["anchor_blend"]))
        right[named, row["task"]] = bits(row["correct"], 400).astype(float)

    def noise(left, other):
        each = [variance(100 * (right[left, t] - right[other, t])) / 400 for t in TASKS]
        return 2 * math.sqrt(sum(each) / 4)

    cell = ("cell", "sites", "0.300000")
    assert cells[6] == f"+5.0 ± {noise((*cell, 1), ('anchor', '', '0.300000', 1)):.1f}"
    assert cells[7] == f"+6.0 ± {noise((*cell, 8), (*cell, 1)):.1f}"
    assert line(page, "anchor alone")[-1].startswith("-20.0 ±")


def test_parts_are_compared_with_the_settings_they_are_added_to_or_left_out_of(study):
    page = extrapolation.parts("mini")
    assert line(page, "start")[1:] == ["66.0", "λ 0.05, KL 0.25", "72.0", "λ by halves, KL 0.25"]
    for name in extrapolation.PARTS:
        added, left_out = line(page, name)[1:]
        assert added.startswith("+1.0 ±") and left_out.startswith("-3.0 ±")


def test_rho_on_a_part_of_the_weights_is_compared_with_rho_1(study):
    page = extrapolation.spectrum("mini")
    assert line(page, "weights, directions below λ")[2:4] == ["69.0", "0.250"]
    assert line(page, "weights, directions below λ")[4].startswith("+5.0 ±")
    assert "λ 0.01: directions 90 %" in page.text


def test_a_model_without_the_study_shows_the_sweep_of_rho_at_the_tuned_settings(ours):
    swept = select(ours.table("sweep"), {"setting": "suite", "parameter": "anchor_blend"})
    swept = swept[(swept["upstream"] == "task_arithmetic") & (swept["at"] > 0)]
    means = swept.groupby("at")["value"].mean()
    lines = extrapolation.lines_of("mini")["smaller CLIP, synthetic images"]
    shown = lines["forward order, λ and α fixed"]
    assert {rho: shown[rho]["value"].mean() for rho in means.index} == dict(means)
    assert {name: set(by_rho) for name, by_rho in lines.items()}["anchor alone"] == {1.0, 2.0}


def test_a_study_that_was_not_run_is_said_to_be_so(results):
    shutil.rmtree(results / "sweep")
    for show in (extrapolation.by_order, extrapolation.parts, extrapolation.spectrum):
        assert extrapolation.NOT_RUN in show("mini").text
    assert "not run" in extrapolation.by_blend("mini").text


def test_what_the_pages_say_of_synthetic_images_is_in_the_rows():
    """Five of six rows with the least λ and a ρ that changes nothing; directions above λ gain more."""
    study = extrapolation.Cells(Evidence("mini", "clip_b32", "8", ROOT / "results" / "mini"))
    lines = study.lines()
    anchor = {rho: rows["value"].mean() for rho, rows in lines.pop(extrapolation.ALONE).items()}
    assert anchor[2] < anchor[1] and anchor[8] < anchor[1] - 40
    *most, other = lines.values()
    assert all(set(rows["ridge"]) == {1e-6} for by_rho in most for rows in by_rho.values())
    assert all(set(rows["ridge"]) != {1e-6} for rows in other.values())
    below, above = (
        study.rows("spectrum", p, ridge=0.05)["value"].mean() for p in ("below", "above")
    )
    assert above > below > study.rows("spectrum", "nowhere", ridge=0.05)["value"].mean()
    assert set(study.rows("spectrum", "everything", ridge=1e-6)["anchor_blend"]) == {8}
