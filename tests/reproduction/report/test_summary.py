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
from reproduction.report.verdicts import DECIDED

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
    assert found["task_arithmetic"]["featcal_tuned"] == pytest.approx(mean(ours), abs=1e-4)
    ours = values("value", scores, upstream="task_arithmetic", method="featcal", setting="paper")
    assert found["task_arithmetic"]["featcal_printed"] == pytest.approx(mean(ours), abs=1e-4)
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


def entries(found):
    """Return claim, source, setting and entry of every verdict."""
    return [
        (name, source, setting, entry)
        for name, claim in found["claims"].items()
        for source, own in claim["verdicts"].items()
        for setting, entry in own.items()
    ]


def test_claims_as_data_hold_every_claim_and_the_squares_of_noise_by_source_add_up(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(write_project(tmp_path))
    data = artifact.claims_as_data("mini")
    assert list(data["claims"]) == [claim.id for claim in claims()]
    found = entries(data)
    assert {setting for _, _, setting, _ in found} == {"paper", "suite"}
    split = [e["noise"] for *_, e in found if e["noise"].get("draws") is not None]
    assert split and all(
        math.hypot(n["draws"], n["test_samples"]) == pytest.approx(n["total"], abs=1e-5)
        for n in split
    )
    clear = [e for *_, e in found if e["verdict"] in DECIDED and "draws" in e["noise"]]
    assert clear and all(
        (e["margin"] > e["noise"]["total"]) == (e["verdict"] == "holds") for e in clear
    )
    assert all(
        e["fragile"] == (0 < abs(e["margin"]) < 1.5 * e["noise"]["total"])
        for e in clear
        if abs(abs(e["margin"]) - 1.5 * e["noise"]["total"]) > 1e-4
    )


def test_every_source_of_the_results_in_git_is_in_the_data():
    found = entries(artifact.claims_as_data("mini"))
    decided = {source for _, source, _, entry in found if entry["verdict"] in DECIDED}
    assert decided == {
        "real_images", "real_encoder", "second_encoder", "real_language", "mini"
    }  # fmt: skip


def test_a_suite_without_results_has_no_metric_and_claims_that_were_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(write_project(tmp_path, empty=True))
    ours = Evidence("mini", "clip_b32", "8")
    assert (artifact.metrics(ours), artifact.by_task(ours), artifact.by_block(ours)) == ({}, [], [])
    assert {e["verdict"] for *_, e in entries(artifact.claims_as_data("mini"))} == {"not run"}
