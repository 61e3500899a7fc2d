"""Claims about more than two models or one experiment: gains, nearness, every column; on invented
results.
"""

import math
from dataclasses import replace

import pandas as pd
import pytest
from synthetic_correct import changed, forget_answers

from reproduction.report.claims import claims
from reproduction.report.statistics import estimate
from reproduction.report.verdicts import judge


def claim(name):
    return next(c for c in claims() if c.id == name)


def test_a_gain_is_held_against_a_gain_with_the_noise_of_four_averages(results):
    forget_answers(results)
    verdict = judge(claim("t2_gain_weaker"), "mini", "suite", results)
    assert verdict.word == "not run", "the larger model with eight tasks has no WUDI here"
    verdict = judge(
        replace(claim("t2_gain_weaker"), over=[["clip_b32", 20]]), "mini", "suite", results
    )
    assert (verdict.word, verdict.one_run) == ("holds", True)
    assert verdict.margin == pytest.approx((80 - 64) - (80 - 76))
    frame = pd.read_csv(results / "scores/clip_b32-20/scores.csv", keep_default_na=False)
    four = [
        ("task_arithmetic", "featcal"),
        ("task_arithmetic", "merged"),
        ("wudi", "featcal"),
        ("wudi", "merged"),
    ]
    parts = [
        estimate(frame[(frame["upstream"] == u) & (frame["method"] == m)].assign(seed="")).variance
        for u, m in four
    ]
    assert verdict.noise == pytest.approx(2 * math.sqrt(sum(parts)))


def test_a_gain_may_be_held_against_one_of_another_pool(results):
    changed(
        results,
        "clip_b32-20",
        lambda f: (f["upstream"] == "wudi") & (f["method"] == "featcal"),
        lambda old: old + 9,
    )
    verdict = judge(claim("t2_gain_wudi_b32"), "mini", "suite", results)
    assert (verdict.word, verdict.detail) == ("holds", "13.0 against 4.0 points gained")


@pytest.mark.parametrize(
    ("ours", "word"), [(0, "holds"), (-5, "within noise"), (-9, "does not hold")]
)
def test_nearer_to_the_experts_means_more_than_half_of_the_way(results, ours, word):
    # the merger has 64, the experts 90, half of the way is 77
    chosen = lambda f: (f["upstream"] == "task_arithmetic") & (f["method"] == "featcal")  # noqa: E731
    changed(results, "clip_l14-14", chosen, lambda old: old + ours + 2)
    verdict = judge(claim("t9_closer"), "mini", "suite", results)
    assert verdict.word == word and verdict.margin == pytest.approx(2 * (82 + ours) - 90 - 64)


def test_a_claim_about_every_column_fails_with_one_and_names_it(results):
    one = replace(claim("t2_ta_surgery"), over=[["clip_b32", 14], ["clip_l14", 20]])
    assert judge(one, "mini", "suite", results).word == "holds"
    changed(results, "clip_l14-20", lambda f: f["method"] == "surgery", 90.0)  # FeatCal has 84.75
    verdict = judge(one, "mini", "suite", results)
    assert verdict.word == "does not hold"
    assert verdict.detail == "1 of 2 columns, fails on 1; decided by: 20 tasks, larger model"
