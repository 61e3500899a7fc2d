"""ARTIFACT.md is current, and its commands and minutes are those of the pipeline and of the run records."""

import json
import math
import re
import runpy
import subprocess
from functools import cache

import pandas as pd
import pytest
from resolved import resolved
from synthetic_results import write_project

from pipeline import RESULTS, ROOT
from reproduction.report import artifact
from reproduction.report.claims import claims
from reproduction.report.evidence import Evidence
from reproduction.report.pages import cost
from reproduction.report.verdicts import DECIDED

text_of = cache(artifact.text)


def test_artifact_md_is_what_results_and_claims_say_now():
    written = (ROOT / "ARTIFACT.md").read_text("utf-8")
    assert written == text_of("mini"), "write it again: dvc repro artifact"


def test_every_headline_claim_stands_in_it_once_with_a_page_that_has_a_stage():
    text, stages = text_of("mini"), set(resolved().nodes)
    for claim in claims():
        assert text.count(f"\n| {' '.join(claim.sentence.split())} |") == claim.headline, claim.id
    assert {f"page@{page}" for page in re.findall(r"page@(\w+)`", text)} <= stages


def test_minutes_of_a_page_are_those_of_the_stages_that_it_needs():
    quickest = cost.stage_seconds("mini")  # of what several pages need
    seconds = {name: quickest[name] for name in ("prepare_data", "prepare_texts")}
    for role in ("flan_t5_base", "flan_t5_large"):
        record = json.loads((RESULTS / f"scores/{role}-glue/run.json").read_text())
        seconds = record["seconds"] | seconds
    assert artifact.minutes("mini", ["page@table03"]) == f"{sum(seconds.values()) / 60:.0f}"
    # experts of smaller pools are in the larger ones
    assert "prepare@clip_b32-8" in artifact.upstream()["page@table10"]


def test_it_counts_the_minutes_of_what_make_runs():
    for target, stages in {"repro": artifact.MAKE_REPRO, "real": artifact.MAKE_REAL}.items():
        command = ["make", "--dry-run", target]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert f"dvc repro {' '.join(stages)}\n" in run.stdout


def test_the_tolerance_is_that_of_the_comparison():
    allowed = runpy.run_path(str(ROOT / "scripts" / "compare_results.py"))
    tolerances = re.findall(r"±(\d+)", artifact.TOLERANCE)
    assert [float(number) for number in tolerances] == [allowed["AVERAGE"], allowed["TASK"]]
    assert f"√({allowed['ANSWERS']}/n)" in artifact.TOLERANCE


def average(kind, **columns):
    frame = pd.read_csv(RESULTS / kind / f"clip_b32-8/{kind}.csv", keep_default_na=False)
    rows = frame[(frame[list(columns)] == pd.Series(columns)).all(axis=1)]
    return pytest.approx(rows["value" if kind == "scores" else "relative_drift"].mean(), abs=1e-4)


FEATCAL = {"upstream": "task_arithmetic", "method": "featcal", "setting": "suite"}


def test_metrics_and_plots_are_averages_of_the_files():
    data = Evidence("mini", "clip_b32", "8")
    metrics = artifact.metrics(data)
    assert metrics["task_arithmetic"]["featcal_tuned"] == average("scores", **FEATCAL)
    printed = average("scores", **FEATCAL | {"setting": "paper"})
    assert metrics["task_arithmetic"]["featcal_printed"] == printed
    assert metrics["wudi"]["merged"] == average("scores", upstream="wudi", method="merged")
    assert metrics["expert"] == average("scores", method="expert")
    tasks = {row["task"]: row for row in artifact.by_task(data)}
    assert list(tasks) == data.tasks
    assert tasks["mnist"]["expert"] == average("scores", method="expert", task="mnist")
    blocks = artifact.by_block(data)
    assert [row["block"] for row in blocks] == list(range(1, len(blocks) + 1))
    assert blocks[0]["featcal"] == average("drift", **FEATCAL, block="00")


def entries(data):
    """Return source, setting and entry of every verdict."""
    sources = [item for claim in data["claims"].values() for item in claim["verdicts"].items()]
    return [(source, setting, entry) for source, item in sources for setting, entry in item.items()]


def test_claims_as_data_hold_every_claim_and_squares_of_noise_by_source_add_up(results):
    data = artifact.claims_as_data("mini")
    assert list(data["claims"]) == [claim.id for claim in claims()]
    listed = entries(data)
    assert {setting for _, setting, _ in listed} == {"paper", "suite"}
    split = [entry for *_, entry in listed if "draws" in entry["noise"]]
    for entry in split:
        noise = entry["noise"]
        parts = math.hypot(noise["draws"], noise["trainings"], noise["test_samples"])
        assert parts == pytest.approx(noise["total"], abs=1e-5)
    decided = [entry for entry in split if entry["verdict"] in DECIDED]
    assert decided
    for entry in decided:
        margin, total = entry["margin"], entry["noise"]["total"]
        assert (margin > total) == (entry["verdict"] == "holds")
        if abs(abs(margin) - 1.5 * total) > 1e-4:
            assert entry["fragile"] == (0 < abs(margin) < 1.5 * total)


def test_a_suite_without_results_has_no_metric_and_claims_that_were_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(write_project(tmp_path, empty=True))
    data = Evidence("mini", "clip_b32", "8")
    assert (artifact.metrics(data), artifact.by_task(data), artifact.by_block(data)) == ({}, [], [])
    assert {e["verdict"] for *_, e in entries(artifact.claims_as_data("mini"))} == {"not run"}
