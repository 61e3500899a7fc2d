"""Pages on numbers of images and on costs: what is read off invented results, and what is said
where nothing was measured.
"""

import json

import pytest
from synthetic_correct import forget_answers

from reproduction.report import claims, cost, verdicts
from reproduction.report.page import Page


def judged(name, results):
    chosen = next(c for c in claims.claims() if c.id == name)
    return verdicts.judge(chosen, "mini", "suite", results)


def changed(results, kind, change):
    """The run record of a study with `change` made to what each run cost."""
    path = results / kind / "clip_b32-8/run.json"
    record = json.loads(path.read_text())
    for run in record["cost"]:
        change(run)
    path.write_text(json.dumps(record))


def test_a_time_is_one_run_and_names_its_machine(results):
    verdict = judged("t5_surgery", results)
    assert (verdict.word, verdict.met, verdict.margin) == (
        "one run",
        True,
        60.0,
    )  # 80 s as published against 4 times 5 s
    assert verdict.detail.endswith("; invented, 2 cores")


def test_kept_features_are_another_row_than_the_published_procedure(results):
    assert (
        judged("t13_surgery_kept", results).word == "does not hold"
    )  # 4 s with kept features against 5 s
    published = judged("t13_surgery", results)  # 80 s, of one run
    assert (published.word, published.met) == ("one run", True)
    assert not judged("t5_surgery_kept", results).met


def test_energy_that_was_not_measured_gives_no_verdict_and_no_number(results):
    assert judged("t5_energy_surgery", results).word == "not run"
    assert "not measured" in cost.single(Page("table05", "mini")).text


def test_energy_that_was_measured_gives_both(results):
    changed(results, "cost", lambda run: run.update(energy_wh=run["seconds"] / 100))
    assert judged("t5_energy_surgery", results).met
    told = cost.single(Page("table05", "mini")).text
    assert "0.80" in told and "power over time" in told


def test_a_claim_about_every_number_of_images_fails_with_one(results):
    assert judged("t12_surgery", results).word == "holds"
    path = results / "samples/clip_b32-8/samples.csv"
    lines = path.read_text().splitlines()
    low = [
        ",".join([*line.split(",")[:-2], "40.0000", "500"])
        if ",featcal," in line and ",64," in line
        else line
        for line in lines
    ]
    path.write_text("\n".join(low) + "\n")
    forget_answers(results)
    verdict = judged("t12_surgery", results)
    assert verdict.word == "does not hold" and "n = 64" in verdict.detail


def test_most_of_a_gain_is_more_than_half_of_it(results):
    verdict = judged("f3_most", results)
    assert (
        verdict.word == "holds"
        and verdict.detail == "13.0 points above the lower model against 4.0 below the upper"
    )
    assert verdict.margin == pytest.approx(13 - 4)


def test_speed_ups_are_relative_to_surgery_as_the_paper_defines_them(results):
    lines = cost.single(Page("table05", "mini")).text.splitlines()
    assert next(line for line in lines if line.startswith("FeatCal")).split("  ")[2] == "16.0×"
    printed = [line for line in lines if line.startswith("FeatCal")][1]
    assert "53  4.1×" in printed
