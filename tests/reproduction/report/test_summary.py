"""Results for other programs: the numbers of the files, recomputed by hand from the rows in git."""

import csv
import math
from statistics import mean

import pytest
from synthetic_results import write_project

from pipeline import ROOT
from reproduction.report import artifact
from reproduction.report.claims import claims
from reproduction.report.evidence import Evidence

RESULTS = ROOT / "results" / "mini"


def rows(kind: str) -> list[dict[str, str]]:
    with (RESULTS / kind / f"clip_b32-8/{kind}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def values(measure: str, found: list[dict[str, str]], **wanted: str) -> list[float]:
    return [
        float(row[measure])
        for row in found
        if all(row[key] == value for key, value in wanted.items())
    ]


def test_metrics_are_averages_of_the_scores():
    found, scores = artifact.metrics(Evidence("mini", "clip_b32", "8")), rows("scores")
    ours = values("value", scores, upstream="task_arithmetic", method="featcal", setting="suite")
    assert found["task_arithmetic"]["featcal"] == pytest.approx(mean(ours), abs=1e-4)
    assert found["wudi"]["merged"] == pytest.approx(
        mean(values("value", scores, upstream="wudi", method="merged")), abs=1e-4
    )
    assert found["expert"] == pytest.approx(
        mean(values("value", scores, method="expert")), abs=1e-4
    )


def test_plots_hold_every_task_and_every_block():
    ours, drift = Evidence("mini", "clip_b32", "8"), rows("drift")
    tasks = {row["task"]: row for row in artifact.by_task(ours)}
    assert list(tasks) == ours.tasks
    assert tasks["mnist"]["expert"] == pytest.approx(
        mean(values("value", rows("scores"), method="expert", task="mnist")), abs=1e-4
    )
    blocks = artifact.by_block(ours)
    assert [row["block"] for row in blocks] == list(range(1, len(blocks) + 1))
    first = values(
        "relative_drift",
        drift,
        method="featcal",
        setting="suite",
        upstream="task_arithmetic",
        block="00",
    )
    assert blocks[0]["featcal"] == pytest.approx(mean(first), abs=1e-6)


def test_claims_as_data_hold_every_claim_and_the_squares_of_noise_by_source_add_up(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(write_project(tmp_path))
    found = artifact.claims_as_data("mini")["claims"]
    assert list(found) == [claim.id for claim in claims()]
    split = [entry["noise"] for entry in found.values() if entry["noise"].get("draws") is not None]
    assert split and all(
        math.hypot(n["draws"], n["test_samples"]) == pytest.approx(n["total"], abs=1e-5)
        for n in split
    )
    clear = [
        entry
        for entry in found.values()
        if entry["verdict"] in ("holds", "does not hold") and "draws" in entry["noise"]
    ]
    assert clear and all(
        (e["margin"] > e["noise"]["total"]) == (e["verdict"] == "holds") for e in clear
    )


def test_a_suite_without_results_has_no_metric_and_claims_that_were_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(write_project(tmp_path, empty=True))
    ours = Evidence("mini", "clip_b32", "8")
    assert (
        artifact.metrics(ours) == {}
        and artifact.by_task(ours) == []
        and artifact.by_block(ours) == []
    )
    assert {entry["verdict"] for entry in artifact.claims_as_data("mini")["claims"].values()} == {
        "not run"
    }
