"""Language models on invented results: verdicts, and the ranges that they were chosen by."""

import pytest
from synthetic_correct import changed

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
