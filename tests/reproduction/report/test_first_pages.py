"""The page for first readers, the list of all claims, and the page of differences and errata: what
they show is computed.
"""

import pytest
from synthetic_correct import forget_answers

from reproduction.report import errata_page, explained
from reproduction.report.page import Page
from reproduction.report.paper import errata, paper_table


def by_id(name):
    return next(entry for entry in errata() if entry.id == name)


def told(name):
    """The evidence beside one erratum."""
    return " ".join(errata_page.evidence_of(by_id(name)))


def test_evidence_is_computed_from_the_printed_tables():
    assert told("t10_average") == "The mean of the 20 printed cells is 73.15; printed is 87.3."
    assert told("t4_change") == "60.8 − 45.3 = 15.5."
    assert "347 and 348 right give 85.05 and 85.29" in told("t3_unattainable")
    assert "C100 is 63.7 in Table 10" in told("t8_c100") and "with what fits 56.9" in told(
        "t8_c100"
    )
    assert "Task Arithmetic w/ FeatCal, 0.08 away on average" in told("t9_foreign_adamerging")


@pytest.mark.parametrize(
    "entry", [entry for entry in errata() if entry.kind == "rotated"], ids=lambda entry: entry.id
)
def test_shifting_cells_back_makes_a_row_like_the_others(entry):
    """An erratum of this kind whose evidence spoke against it would be a mistake of ours."""
    words = errata_page.evidence_of(entry)[0].split()
    printed, mended = (
        float(word) for word in words if word.replace(".", "").isdigit() and "." in word
    )
    assert mended < printed / 2


@pytest.mark.parametrize(
    ("table", "others"), [("table01", ("table08", "table10")), ("table07", ("table09", "table11"))]
)
def test_another_vintage_is_told_of_exactly_the_cells_that_differ(table, others):
    here = (
        paper_table(table)
        .set_index(["upstream", "method", "task"])["value"]
        .sort_index()["", "base"]
        .drop("average")
    )
    there = [
        paper_table(other)
        .set_index(["upstream", "method", "task"])["value"]
        .sort_index()["", "base"][here.index]
        for other in others
    ]
    differing = {cell for cell in here.index if any(values[cell] != here[cell] for values in there)}
    assert set(by_id(f"t{int(table[-2:])}_vintage").cells) == differing


def test_the_first_page_draws_blocks_and_the_drift_behind_them(ours):
    drift = explained.drift(ours)
    assert list(drift.index) == ["featcal", "merged"] and drift.shape[1] == 6
    picture = explained.picture(Page("start", "mini")).bundle["image/svg+xml"]
    assert "<image" not in picture and len(picture) < 100_000
    assert (
        "of the way from the merged model to the experts"
        in explained.outcome(Page("start", "mini")).text
    )


def test_without_a_gap_there_is_no_share_of_it(results):
    file = results / "scores/clip_b32-8/scores.csv"
    lines = [line.split(",") for line in file.read_text().splitlines()]
    value = lines[0].index("value")
    level = [lines[0], *([*line[:value], "50.0", *line[value + 1 :]] for line in lines[1:])]
    file.write_text("".join(",".join(line) + "\n" for line in level))
    forget_answers(file.parent)
    assert "no way to go" in explained.outcome(Page("start", "mini")).text
