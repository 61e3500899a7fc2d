"""ARTIFACT.md is current, and its commands and minutes are those of the pipeline and of the run records."""

import json
import re
import runpy
import subprocess
from functools import cache

import pytest
from resolved import resolved, stages_of_dvc_repro

from pipeline import ROOT
from reproduction.report import artifact
from reproduction.report.claims import claims
from reproduction.report.pages import resources

RESULTS = ROOT / "results" / "mini"
text_of = cache(artifact.text)


def test_artifact_md_is_what_results_and_claims_say_now():
    assert (ROOT / "ARTIFACT.md").read_text("utf-8") == text_of("mini"), (
        "write it again: dvc repro artifact"
    )


def test_every_headline_claim_stands_in_it_once_with_a_page_that_has_a_stage():
    text, stages = text_of("mini"), set(resolved().nodes)
    for claim in claims():
        rows = [
            line
            for line in text.splitlines()
            if line.startswith(f"| {' '.join(claim.sentence.split())} |")
        ]
        assert len(rows) == claim.headline, claim.id
    assert {f"page@{page}" for page in re.findall(r"page@(\w+)`", text)} <= stages


def test_minutes_of_a_page_are_those_of_the_stages_that_it_needs():
    seconds = json.loads((RESULTS / "scores/flan_t5_base-glue/run.json").read_text())["seconds"]
    seconds |= json.loads((RESULTS / "scores/flan_t5_large-glue/run.json").read_text())["seconds"]
    seconds["prepare_data"] = resources.quickest("mini")[
        "prepare_data"
    ]  # writes what the suite is, which every page tells
    assert artifact.minutes("mini", ["page@table03"]) == f"{sum(seconds.values()) / 60:.0f}"
    assert "prepare@clip_b32-8" in artifact.upstream()["page@table10"], (
        "experts of smaller pools are in the larger ones"
    )


def test_minutes_of_dvc_repro_are_those_of_what_it_looks_at():
    told = {resolved().nodes[name]["cmd"]: name for name in stages_of_dvc_repro()}
    spent = [
        s
        for stage, s in resources.quickest("mini").items()
        if f"featcal stage {stage.replace('@', ' ')}" in told
    ]
    text = re.search(r"`dvc repro` \| .* \| (\d+) \|", text_of("mini"))
    assert spent and text and text[1] == f"{sum(spent) / 60:.0f}"
    assert "evaluate@minilm-8" in artifact.upstream()[artifact.REAL[0]]


def test_it_counts_the_minutes_of_what_make_runs():
    for target, stages in {"repro": artifact.REPRO, "real": artifact.REAL}.items():
        told = subprocess.run(
            ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        assert f"dvc repro {' '.join(stages)}\n" in told


def test_the_tolerance_is_that_of_the_comparison():
    allowed = runpy.run_path(str(ROOT / "scripts" / "compare_results.py"))
    told = re.findall(r"±(\d+)", artifact.TOLERANCE)
    assert [float(number) for number in told] == [allowed["AVERAGE"], allowed["TASK"]]
    assert f"√({allowed['ANSWERS']}/n)" in artifact.TOLERANCE
