"""The one-liners of the pages that show an accuracy table: the table, the paper's own values, the
share of the gap recovered.
"""

from collections.abc import Mapping
from html import escape

from reproduction.report import tables
from reproduction.report.evidence import Evidence
from reproduction.report.html import PageOutput, fold, note, table
from reproduction.report.page import Page
from reproduction.report.reproduced import elsewhere
from reproduction.report.tables import accuracy_table

LEGEND = "Arrows: against the block’s merger. sd: over seeds. Bold: best of the block."


def measured(page: Page) -> PageOutput:
    """The page's accuracy table in the paper's row order, at the suite's main settings; its other
    settings are folded away.
    """
    ours = page.evidence
    main, *others = tables.settings_shown(page.suite, ours.pool)
    html = _table(page, main, tables.accuracy_rows(ours))
    for setting in others:
        words = f"The same blocks at the {tables.SETTING_LABELS[setting]}"
        html += fold(words, _table(page, setting, tables.accuracy_rows(ours, setting)))
    return PageOutput(html + page.against_printed())


def _table(page: Page, setting: str, rows: list[tables.Row]) -> str:
    ours = page.evidence
    caption = f"Top-1 accuracy (%) on test {page.inputs}, at the {tables.SETTING_LABELS[setting]} — {page.label}. {LEGEND}"
    return accuracy_table(rows, ours.tasks, [ours.title(task) for task in ours.tasks], caption)[0]


def printed(page: Page) -> PageOutput:
    """The paper's printed table, folded away, with the cells in doubt marked."""
    number = page.topic.printed
    tasks, rows = tables.paper_rows(number)
    caption = f"The paper’s Table {int(number[-2:])}, as printed: real CLIP models on real data"
    return PageOutput(
        folded_table(*accuracy_table(rows, tasks, [tables.TASKS[task] for task in tasks], caption))
    )


def folded_table(html: str, marks: list[str]) -> str:
    """A printed table one click away, the reasons of its marked cells below it."""
    reasons = "".join(f"<li>{escape(mark)}</li>" for mark in marks)
    doubts = f"<p>Cells in doubt:</p><ol>{reasons}</ol>" if marks else ""
    return fold("The paper’s own values", html + doubts)


def recovered(page: Page) -> PageOutput:
    """The share of the way from each merger to the experts that FeatCal goes, here and in the
    paper.
    """
    rows = share_rows(page.evidence, page.topic.printed, tables.UPSTREAMS)
    if not rows:
        return PageOutput(
            note(
                "○ not run: the share of the gap that FeatCal recovers needs a merger, FeatCal and the experts."
            )
        )
    caption = f"Share of the gap between merger and experts that FeatCal recovers — {page.label}"
    return PageOutput(table(["Merger, settings", "Here", elsewhere(page.suite)], rows, caption))


def share_rows(
    ours: Evidence, number: str, names: Mapping[str, str], model: str = ""
) -> list[tuple[str, list[str]]]:
    """A row per merger and settings: the share of the gap here, and as the printed table has it.
    names: of rows, by merger.
    """
    rows = []
    for item in tables.recovered(ours):
        spread = f" <small>sd {item.spread:.1f}</small>" if item.spread is not None else ""
        one = ' <small class="fc-run">one seed</small>' if item.one_run else ""
        name = f"{names[item.upstream]}, {tables.SETTING_LABELS[item.setting]}"
        rows.append(
            (
                "",
                [
                    name,
                    f"{item.share:.0f} %{spread}{one}",
                    _paper_share(number, item.upstream, model),
                ],
            )
        )
    return rows


def _paper_share(number: str, upstream: str, model: str) -> str:
    """The paper's share as printed; with cells corrected as well, where that changes it."""
    shares = (
        tables.paper_recovered(number, upstream, corrected, model) for corrected in (False, True)
    )
    said, mended = ("–" if share is None else f"{share:.0f} %" for share in shares)
    return (
        said if said == mended else f"{said}<small>{mended} with doubtful cells corrected</small>"
    )
