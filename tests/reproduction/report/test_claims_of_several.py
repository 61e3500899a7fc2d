"""Claims about more than two models or one experiment: gains, nearness, every column; on invented results."""

import math
from dataclasses import replace

import pandas as pd
import pytest
from synthetic_correct import forget_answers
from synthetic_results import write_project

from reproduction.report.claims import claims
from reproduction.report.estimate import estimate
from reproduction.report.verdicts import judge


def claim(name):
    return next(c for c in claims() if c.id == name)


def test_a_gain_is_held_against_a_gain_with_the_noise_of_four_averages(tmp_path):
    folder = forget_answers(write_project(tmp_path))
    verdict = judge(claim("t2_gain_weaker"), "mini", "suite", folder)
    assert verdict.word == "not run", "the larger model with eight tasks has no WUDI here"
    verdict = judge(replace(claim("t2_gain_weaker"), over=[["clip_b32", 20]]), "mini", "suite", folder)
    assert (verdict.word, verdict.one_run) == ("holds", True)
    assert verdict.margin == pytest.approx((80 - 64) - (80 - 76))
    frame = pd.read_csv(folder / "clip_b32-20.csv", keep_default_na=False)
    four = [("task_arithmetic", "featcal"), ("task_arithmetic", "merged"), ("wudi", "featcal"), ("wudi", "merged")]
    parts = [estimate(frame[(frame["upstream"] == u) & (frame["method"] == m)].assign(seed="")).variance for u, m in four]
    assert verdict.noise == pytest.approx(2 * math.sqrt(sum(parts)))


def test_a_gain_may_be_held_against_one_of_another_pool(tmp_path):
    folder = forget_answers(write_project(tmp_path))
    frame = pd.read_csv(folder / "clip_b32-20.csv", keep_default_na=False)
    frame.loc[(frame["upstream"] == "wudi") & (frame["method"] == "featcal"), "value"] += 9
    frame.to_csv(folder / "clip_b32-20.csv", index=False)
    verdict = judge(claim("t2_gain_wudi_b32"), "mini", "suite", folder)
    assert (verdict.word, verdict.detail) == ("holds", "13.0 against 4.0 points gained")


@pytest.mark.parametrize(("ours", "word"), [(0, "holds"), (-5, "within noise"), (-9, "does not hold")])
def test_nearer_to_the_experts_means_more_than_half_of_the_way(tmp_path, ours, word):
    folder = forget_answers(write_project(tmp_path))
    frame = pd.read_csv(folder / "clip_l14-14.csv", keep_default_na=False)
    frame.loc[(frame["upstream"] == "task_arithmetic") & (frame["method"] == "featcal"), "value"] += ours + 2
    frame.to_csv(folder / "clip_l14-14.csv", index=False)  # the merger has 64, the experts 90, half of the way is 77
    verdict = judge(claim("t9_closer"), "mini", "suite", folder)
    assert verdict.word == word and verdict.margin == pytest.approx(2 * (82 + ours) - 90 - 64)


def test_a_claim_about_every_column_fails_with_one_and_names_it(tmp_path):
    folder = forget_answers(write_project(tmp_path))
    one = replace(claim("t2_ta_surgery"), over=[["clip_b32", 14], ["clip_l14", 20]])
    assert judge(one, "mini", "suite", folder).word == "holds"
    frame = pd.read_csv(folder / "clip_l14-20.csv", keep_default_na=False)
    frame.loc[frame["method"] == "surgery", "value"] = 90.0  # FeatCal has 84.75
    frame.to_csv(folder / "clip_l14-20.csv", index=False)
    verdict = judge(one, "mini", "suite", folder)
    assert verdict.word == "does not hold"
    assert verdict.detail == "1 of 2 columns, fails on 1; decided by: 20 tasks, larger model"
