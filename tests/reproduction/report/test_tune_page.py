"""The study of settings chosen without labels: its refusals, and its page against numbers counted
by hand.
"""

import csv
import math
from collections import defaultdict
from statistics import variance

import pytest
from synthetic_correct import forget_answers

import pipeline
from featcal.errors import BadSetting
from reproduction.experiments import shared_settings, study_run
from reproduction.report import tune
from reproduction.report.evidence import Evidence
from reproduction.report.tune import found

SETTINGS = pipeline.settings()


def study(key, suite="mini", **changed):
    section, common = SETTINGS["tune"][key], shared_settings(key, SETTINGS["studied"][key], suite)
    return study_run(
        "tune", key, {**section, "mini": section["mini"] | changed}, suite, {key: common}
    )


def test_the_studies_of_params_begin_at_the_papers_settings_and_read_texts_as_the_calibration_does():
    for key in ("clip_b32-8", "flan_t5_base-glue"):
        made = study(key)
        assert (made.paper.ridge, made.suite.ridge) == (
            (0.05, 1e-6) if "clip" in key else (1e-5, 1.0)
        )
        assert (made.reading is None) == ("clip" in key)
        assert study(key, "paper").suite is None
        assert study(key, "files") is None


@pytest.mark.parametrize(
    ("key", "changed", "words"),
    [
        ("clip_b32-8", {"holdout": 1}, "holdout"),
        ("clip_b32-8", {"trials": 0}, "trials"),
        ("clip_b32-8", {"reading": {"split": "train"}}, "texts alone"),
        ("llama_3b-mergebench", {"reading": None}, "must be told of texts"),
        (
            "clip_b32-8",
            {"paper": {"ridge": 0.0, "anchor_blend": 1.0, "interpolation": 0.3}},
            "tune.clip_b32-8.mini.paper.ridge",
        ),
    ],
)
def test_what_a_study_cannot_be_is_refused_by_name(key, changed, words):
    with pytest.raises(BadSetting, match=words):
        study(key, **changed)


def test_distance_and_gain_are_differences_of_averages_with_their_standard_errors(results):
    it = found(Evidence("mini", "clip_b32", "8"))
    assert (it.chosen.trial, it.best.trial, it.start.trial, it.reference.score.mean) == (
        2,
        1,
        0,
        70.0,
    )
    right = defaultdict(dict)  # trial → task → 0 or 1 of every sample
    with (results / "tune/clip_b32-8/tune.correct.csv").open() as text:
        for row in csv.DictReader(text):
            right[int(row["trial"])][row["task"]] = [
                int(bit) for bit in f"{int(row['correct'], 16):0400b}"
            ]

    def paired(one, other):  # two tasks of 400 samples, which both saw
        apart = [
            [100 * (a - b) for a, b in zip(right[one][t], right[other][t], strict=True)]
            for t in ("mnist", "dtd")
        ]
        return 2 * math.sqrt(sum(variance(each) / 400 for each in apart) / 4)

    assert it.distance == pytest.approx((1.0, paired(1, 2)))
    assert it.gain == pytest.approx((14.0, paired(2, 0)))
    assert it.agreement == pytest.approx(0.5)  # two of three in order


def test_without_right_samples_the_errors_of_both_averages_add_up(results):
    forget_answers(results)
    it = found(Evidence("mini", "clip_b32", "8"))
    of = {
        value: value * (100 - value) / 400 / 2 for value in (60.0, 74.0, 75.0)
    }  # two tasks of 400 samples
    assert it.distance == pytest.approx((1.0, 2 * math.sqrt(of[75.0] + of[74.0])))
    assert it.gain == pytest.approx((14.0, 2 * math.sqrt(of[74.0] + of[60.0])))


def test_models_that_were_not_searched_for_are_left_out(results):
    path = results / "tune/clip_b32-8/tune.csv"
    path.write_text(path.read_text().splitlines()[0] + "\n")
    assert "not run: CLIP ViT-B/32, 8 tasks" in tune.summary("mini").text
    told = tune.values("mini").text
    assert "CLIP ViT-B/32, 8 tasks" not in told and "CLIP ViT-B/32, 20 tasks" in told
