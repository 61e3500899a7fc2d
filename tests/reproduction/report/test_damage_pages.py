"""Damaged calibration images, sweeps and the controls' gains on invented results, checked against
numbers counted by hand.
"""

import pytest
from synthetic_correct import forget_answers

from reproduction.report import corrupted, gain, sweeps
from reproduction.report.claims import claims
from reproduction.report.evidence import Evidence
from reproduction.report.page import Page
from reproduction.report.verdicts import judge


def test_the_clean_column_is_what_the_scores_say_of_the_same_seed(results):
    rows = Evidence("mini", "clip_b32", "8").table("corrupted")
    clean = rows[rows["corruption"] == "clean"]
    assert set(clean["method"]) == {"merged", "featcal", "surgery"} and set(clean["seed"]) == {
        "",
        "42",
    }
    assert set(clean["setting"]) == {"", "suite", "paper", "suite_train"}
    featcal = next(
        line
        for line in corrupted.averages(Page("table06", "mini")).text.splitlines()
        if line.startswith("w/ FeatCal")
    )
    assert featcal.split("  ")[1:] == [
        "81.8",
        "77.8",
        "↓4.0",
        "77.8",
        "↓4.0",
        "77.8",
        "↓4.0",
        "78.8",
    ]


def test_what_damage_costs_stands_beside_each_setting(results):
    suite, paper = corrupted.firmer(Page("table06", "mini")).text.splitlines()[-2:]
    assert suite.split()[-7:] == ["81.8", "77.8", "↓4.0", "77.8", "↓4.0", "77.8", "↓4.0"]
    assert paper.split()[-7:] == ["73.8", "72.8", "↓1.0", "72.8", "↓1.0", "72.8", "↓1.0"]


def word(name, folder):
    return judge(next(c for c in claims() if c.id == name), "mini", "suite", folder).word


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("t6_surgery", "holds"),
        ("t6_prob_surgery", "not run"),
        ("t6_fog_below_clean", "holds"),
        ("f5_ridge_flat_ta", "holds"),  # level: no difference at all
        ("f5_ridge_large_wudi", "holds"),
        ("f5_alpha_small_ta", "within noise"),  # 0.3 and 0 are alike
        ("f5_alpha_end_ta", "holds"),
        ("f5_rho_wudi_most", "holds"),  # 8 points against 4
    ],
)
def test_claims_about_studies_are_judged_from_their_files(results, name, said):
    assert word(name, results) == said


def test_a_level_claim_fails_when_the_points_differ(results):
    path = results / "sweep/clip_b32-8/sweep.csv"
    path.write_text(
        path.read_text()
        .replace("ridge,0.0001,0", "ridge,0.00011,0")
        .replace("ridge,100,0", "ridge,0.0001,0")
    )
    forget_answers(results)
    assert word("f5_ridge_flat_ta", results) == "does not hold"


def test_a_fall_is_not_compared_without_its_chosen_value(results):
    path = results / "sweep/clip_b32-8/sweep.csv"
    path.write_text(path.read_text().replace("anchor_blend,2,1", "anchor_blend,2,0"))
    assert word("f5_rho_wudi_most", results) == "not run"


def test_a_curve_rises_in_its_values_and_knows_what_was_chosen(results):
    points = sweeps.curve(Evidence("mini", "clip_b32", "8"), "interpolation", "wudi", "suite")
    assert list(points.index) == [0, 0.3, 0.6, 0.9, 1] and list(points["chosen"]) == [0, 0, 0, 1, 0]


def test_questions_are_answered_with_margins(results):
    line = next(
        line
        for line in gain.questions("mini").text.splitlines()
        if line.startswith("On the same images: FeatCal")
    )
    assert "+10.0 above" in " ".join(line.split())


def test_sentences_say_what_a_mean_shift_reaches_and_what_becomes_of_a_merger_that_featcal_lowers(
    results,
):
    shift, closed = gain.told("mini").text.splitlines()[:2]
    assert (
        "takes task arithmetic from 65.8 to 71.0 (+5.2   above); FeatCal against it: +11.0   above."
        in shift
    )
    assert "FeatCal takes WUDI in closed form from 85.8 to 75.8 (-10.0   below)" in closed
    assert closed.endswith("What this merger has gained is not preserved.")


@pytest.mark.parametrize(
    ("level", "said"), [(95, "is kept."), (86, "Noise can explain the change")]
)
def test_a_merger_that_featcal_raises_keeps_its_gain_and_noise_is_no_change(results, level, said):
    path = results / "scores/clip_b32-8/scores.csv"
    rows = [line.split(",") for line in path.read_text().splitlines()]
    for row in rows:
        if row[3:5] == ["wudi_closed_form", "featcal"]:
            row[9] = f"{level:.4f}"
    path.write_text("".join(",".join(row) + "\n" for row in rows))
    forget_answers(path.parent)
    assert any(said in line for line in gain.told("mini").text.splitlines())
