"""What FeatCal's anchor alone does to a merged language model: base + ρ (merged − base), no text
looked at, nothing solved.

It is what every weight is drawn to. For the larger Llama the paper takes λ = 3: the sums of three
experts, each of norm 1, then weigh no more than the anchor in any direction.
"""

from reproduction.report.controls import margin, standing
from reproduction.report.evidence import Evidence, select
from reproduction.report.html import PageOutput, compact, estimated, fold, table
from reproduction.report.language import MERGER, UNITS, blocks, experiments
from reproduction.report.page import Page
from reproduction.report.paper import PAPER_SETTINGS, player
from reproduction.report.statistics import estimate
from reproduction.report.tables import (
    METHODS,
    UPSTREAMS,
    Key,
    Row,
    average,
    measured_cells,
    with_changes,
)

FEATCAL: Key = (MERGER, "featcal", "paper")
ANCHOR: Key = (MERGER, "anchor", "paper")
MERGED: Key = (MERGER, "merged", "")
NAMES = {
    MERGED: UPSTREAMS[MERGER],
    ANCHOR: "The anchor alone, ρ times the merger’s change",
    FEATCAL: METHODS["featcal"],
}


def folded(page: Page) -> PageOutput:
    """How far FeatCal is from its anchor: averages with their margins, and below them every
    column.
    """
    caption = f"{UNITS[page.place[1]]} — {page.label}. Arrows: against task arithmetic."
    return PageOutput(
        fold("What FeatCal’s anchor alone does", distances(page) + blocks(page, rows, caption))
    )


def rows(ours: Evidence) -> list[Row]:
    """Task arithmetic, its change ρ times as long, and FeatCal."""
    found = []
    for key, name in NAMES.items():
        found.append(
            Row(
                name,
                "merger" if key == MERGED else "calibrated",
                MERGER,
                *measured_cells(ours, key),
            )
        )
    return [with_changes(row, found[0]) if row.kind == "calibrated" else row for row in found]


def distances(page: Page) -> str:
    """Of both sizes: averages of the merger, of the anchor and of FeatCal, and which of them
    differ.
    """
    body = []
    for ours in experiments(page):
        values = PAPER_SETTINGS[ours.role]
        name = f"{player(ours.role, page.suite)}<small>λ = {compact(values.ridge)}, ρ = {compact(values.anchor_blend)}</small>"
        merged, anchor, featcal = (average(ours, key) for key in (MERGED, ANCHOR, FEATCAL))
        cells = [estimated(merged), estimated(anchor), estimated(featcal)]
        cells += [margin(anchor, merged), margin(featcal, anchor)]
        body.append(("", [name, *cells, _furthest(ours)]))
    head = [
        "",
        "Task arithmetic",
        "Anchor alone",
        "FeatCal",
        "Anchor against task arithmetic",
        "FeatCal against its anchor",
    ]
    caption = f"Averages (%) and their margins (points); within noise: at most two standard errors — {page.label}"
    return table([*head, "Largest distance in a column"], body, caption, "fc-long")


def _furthest(ours: Evidence) -> str:
    """The column in which FeatCal and its anchor are furthest apart."""
    found = {}
    for task in ours.tasks:
        scores = select(ours.table("scores"), {"task": task, "upstream": MERGER})
        featcal, anchor = (
            estimate(select(scores, {"method": key[1], "setting": key[2]}))
            for key in (FEATCAL, ANCHOR)
        )
        if featcal and anchor:
            found[task] = (featcal, anchor)
    if not found:
        return "–"
    task, pair = max(found.items(), key=lambda item: abs(item[1][0].mean - item[1][1].mean))
    return f"{ours.title(task)}: {standing(*pair)}"
