"""Rankings and controls on invented results: ranks, orders, pairs and standings that can be counted
by hand.
"""

import pytest
from synthetic_correct import forget_answers

from reproduction.report import controls, rankings
from reproduction.report.evidence import Evidence
from reproduction.report.page import Page


def test_equal_values_share_a_rank_and_the_next_one_is_left_out():
    assert rankings.ranks([70.04, 80.0, 69.96, 60.0]) == [2, 1, 2, 4]


def test_rows_of_the_paper_stand_by_our_average_with_the_printed_one_beside_them(results):
    found = rankings.ranked("mini", "clip_b32")
    assert [(row.upstream, row.method) for row in found] == [
        ("task_arithmetic", "featcal"),  # 80.2 over three seeds
        ("average", "featcal"),
        ("task_arithmetic", "surgery"),
        ("task_arithmetic", "merged"),
        ("average", "merged"),
    ]
    assert (found[0].paper, found[2].paper) == (85.5, 77.0)


def test_the_order_on_a_merger_is_told_in_words(results):
    text = rankings.orders("mini").text.splitlines()
    line = next(line for line in text if line.startswith("Task Arithmetic, smaller model"))
    assert line.split("  ")[1:] == ["FeatCal > Surgery > the merger alone"] * 2


def test_neighbours_that_noise_cannot_tell_apart_are_joined(results):
    path = results / "scores/clip_b32-8/scores.csv"
    rows = [line.split(",") for line in path.read_text().splitlines()]
    for row in rows:
        if row[4:6] == ["surgery", "suite"]:
            row[9] = "81.5000"  # FeatCal's average is 81.95
    path.write_text("".join(",".join(row) + "\n" for row in rows))
    forget_answers(path.parent)
    assert "FeatCal ≈ Surgery > the merger alone" in rankings.orders("mini").text


def test_every_pair_is_counted_once(results):
    line = next(
        line for line in rankings.agreement("mini").text.splitlines() if line.startswith("Smaller")
    )
    kept, turned, close = map(int, line.split("  ")[1:])
    assert kept + turned + close == 5 * 4 // 2
    assert turned == 0 and close == 1, (
        "FeatCal on the two mergers is 0.2 apart; everything else is as in the paper"
    )


def test_controls_stand_against_featcal_with_room_for_noise(results):
    ours = Evidence("mini", "clip_b32", "8")  # FeatCal's average is 81.95
    standing = {
        (method, setting): controls._against(
            ours, ("task_arithmetic", method, setting), "task_arithmetic"
        )[1]
        for method, setting in (
            ("surgery", "suite_train"),
            ("anchor", ""),
            ("featcal", "without_bias"),
            ("featcal", "suite"),
        )
    }
    assert standing["surgery", "suite_train"] == "-10.0 <small>below</small>"
    assert standing["anchor", ""] == "-22.2 <small>below</small>"
    assert standing["featcal", "without_bias"] == "-1.2 <small>below</small>", (
        "on the same images; 80.75 of one seed"
    )
    assert standing["featcal", "suite"] == "–"
    ours = Evidence("mini", "clip_b32", "8", forget_answers(results))
    alone = controls._against(
        ours, ("task_arithmetic", "featcal", "without_bias"), "task_arithmetic"
    )[1]
    assert alone == "-1.2 <small>within noise</small>", "as if on other images"


def test_the_fold_below_a_table_holds_what_was_run_and_nothing_else(results):
    shown = controls.folded(Page("table01", "mini"))
    assert shown.html.startswith("<details")
    lines = shown.text.splitlines()
    assert any(line.startswith("w/ Surgery, in proportion, training") for line in lines)
    assert any(
        line.startswith("w/ mean shift, one constant vector per task, training") for line in lines
    )
    assert any(line.startswith("WUDI-Merging, closed form") for line in lines), (
        "a merger beside which the paper has no row"
    )
    assert not any("ProbSurgery" in line or "not run" in line for line in lines)


def test_a_curve_of_adapters_starts_at_one_and_is_a_mean_over_seeds(results):
    drawn = rankings.adapters(Evidence("mini", "clip_b32", "8")).axes[0].lines[0]
    assert list(drawn.get_xdata()) == [10, 20, 30]
    assert list(drawn.get_ydata()) == pytest.approx([1, 1 / 2, 1 / 3], abs=1e-5)
