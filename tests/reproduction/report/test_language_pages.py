"""Language models on invented results: verdicts, and the ranges that they were chosen by."""

import pytest
from synthetic_correct import changed

from reproduction.report import language_tasks, overview
from reproduction.report.claims import claims
from reproduction.report.verdicts import judge


def claim(name):
    return next(c for c in claims() if c.id == name)


def test_an_expert_loses_a_claim_that_its_own_test_contradicts(results):
    assert judge(claim("t14_coding_humaneval"), "mini", "suite", results).word == "holds"
    coding = "coding", "humaneval_plus"
    changed(
        results,
        "llama_8b-mergebench",
        lambda f: (f["setting"] == coding[0]) & (f["task"] == coding[1]),
        20.0,
    )
    assert judge(claim("t14_coding_humaneval"), "mini", "suite", results).word == "does not hold"


def test_a_claim_about_one_task_reads_that_task_alone(results):
    changed(
        results,
        "llama_8b-mergebench",
        lambda f: (f["method"] == "featcal") & (f["task"] == "ifeval"),
        99.0,
    )
    verdict = judge(claim("t4_8b_gain_ifeval"), "mini", "suite", results)
    assert verdict.word == "holds" and verdict.detail.startswith("5 of 5 other tasks; ")
    raised = judge(claim("t4_8b_ifeval"), "mini", "suite", results)
    assert raised.detail == "99.0 against 74.0" and raised.one_run


def test_ranges_of_language_models_name_what_lies_outside(results):
    lines = language_tasks.ranges("mini").text.splitlines()
    smaller = next(line for line in lines if "FLAN-T5-base" in line)
    assert smaller.endswith("✓ all met")
    assert next(line for line in lines if "Llama-3.2-3B" in line).endswith("✓ all met")
    paper = [line.split("  ") for line in lines if line.startswith("the paper")]
    assert paper[0][1:4] == ["75.7", "78.9", "86.4"] and paper[2][1:4] == [
        "61.1",
        "60.1",
        "56.0 · 63.5 · 69.7",
    ]
    for key, rows in (("flan_t5_base-glue", "base"), ("llama_3b-mergebench", "expert")):
        changed(results, f"{key}.references", lambda f, m=rows: f["method"] == m, 20.0)
    text = language_tasks.ranges("mini").text
    assert "✗ outside: base" in text and "✗ not above the base: coding, math, instruction" in text


def test_models_that_were_not_chosen_by_ranges_are_held_to_none(results):
    for name in ("choice", "language_choice"):
        (results / f"{name}.json").write_text("{}")
    for text in (language_tasks.ranges("mini").text, overview.ranges("mini").text):
        assert "not chosen by ranges" in text and "✓" not in text and "✗" not in text
