"""The one-liners of the pages of language models, Tables 3, 4 and 14: both sizes of a model as
blocks of one table.

At the suite's settings λ and α are those that validation texts of mini chose, and adapters have the
published code's proportion to the width of the features.
"""

from collections.abc import Callable

from reproduction.report import domain_experts, tables
from reproduction.report.accuracies import folded_table, share_rows
from reproduction.report.evidence import Evidence
from reproduction.report.html import PageOutput, fold, note, table
from reproduction.report.page import Page
from reproduction.report.paper import PAPER_MODELS, PAPER_NAMES, TEXT_TASKS, player
from reproduction.report.reproduced import elsewhere
from reproduction.report.tables import Cell, Row, accuracy_table

MERGER = "task_arithmetic"
UNITS = {
    "glue": "Exactly right answers (%), for STS-B Spearman’s ρ in percent, on test texts",
    "mergebench": "Right answers (%) on test prompts",
}
LEGEND = "Arrows: against task arithmetic. Bold: best of what was merged."

Rows = Callable[[Evidence], list[Row]]


def experiments(page: Page) -> list[Evidence]:
    """The results behind a page, one per block."""
    return [Evidence(page.suite, *place) for place in page.topic.places]


def measured(page: Page) -> PageOutput:
    """Table 3 or 4 in the paper's order of rows; the same at the other settings is folded away."""
    pool = page.place[1]
    main, *others = tables.settings_shown(page.suite, pool)
    html = _at(page, main)
    for setting in others:
        html += fold(f"The same rows {tables.setting_label(setting)}", _at(page, setting))
    return PageOutput(html + page.against_printed())


def _at(page: Page, setting: str) -> str:
    pool = page.place[1]
    caption = f"{UNITS[pool]}, {tables.setting_label(setting)} — {page.label}. {LEGEND}"
    return blocks(page, lambda ours: accuracy_rows(ours, setting), caption)


def accuracy_rows(ours: Evidence, setting: str) -> list[Row]:
    """One block: base, experts, task arithmetic, and what calibrates it at one setting."""

    def look(upstream: str, method: str) -> tuple[dict[str, Cell], bool]:
        if method == "expert" and ours.pool == "mergebench":
            return domain_experts.highest(domain_experts.models(ours).values()), False
        return tables.measured_cells(ours, tables.model_key(upstream, method, setting))

    return tables.rows_in_order(look, ("base", "expert"), (MERGER,))


def blocks(page: Page, rows_of: Rows, caption: str) -> str:
    """The rows of both sizes below each other, each block under its model's name."""
    found = experiments(page)
    rows = [
        row for ours in found for row in (heading(player(ours.role, page.suite)), *rows_of(ours))
    ]
    run = {task for ours in found if ours.was_run for task in ours.tasks}
    columns = [task for task in TEXT_TASKS[found[0].pool] if task in run or not run]
    return accuracy_table(rows, columns, [found[0].title(column) for column in columns], caption)[0]


def heading(name: str) -> Row:
    """The line above a block."""
    return Row(name, "heading", "", {})


def printed(page: Page) -> PageOutput:
    """The paper's printed table, folded away, with the cells in doubt marked."""
    pool, rows = page.place[1], []  # type: str, list[Row]
    for role, _ in page.topic.places:
        model = PAPER_MODELS[role]
        rows += [heading(PAPER_NAMES[role])]
        rows += (
            domain_experts.printed_rows(model)
            if page.name == "table14"
            else tables.paper_rows(page.name, model)[1]
        )
    caption = (
        f"The paper’s Table {int(page.name[-2:])}, as printed: the models it names on public data"
    )
    return PageOutput(
        folded_table(
            *accuracy_table(rows, list(TEXT_TASKS[pool]), list(TEXT_TASKS[pool].values()), caption)
        )
    )


def experts(page: Page) -> PageOutput:
    """Table 14: the base and every expert on all tests, and the highest of them column by
    column.
    """
    caption = f"{UNITS['mergebench']} — {page.label}. Arrows: against the base. Bold: highest, what the last row takes."
    return PageOutput(blocks(page, domain_experts.rows, caption) + page.against_printed())


def recovered(page: Page) -> PageOutput:
    """The share of the way from task arithmetic to the experts that FeatCal goes, here and in the
    paper.
    """
    rows = []
    for ours in experiments(page):
        rows += share_rows(
            ours, page.name, {MERGER: player(ours.role, page.suite)}, PAPER_MODELS[ours.role]
        )
    if not rows:
        return PageOutput(
            note(
                "○ not run: the share of the gap that FeatCal recovers needs a merger, FeatCal and the experts."
            )
        )
    caption = (
        f"Share of the gap between task arithmetic and experts that FeatCal recovers — {page.label}"
    )
    return PageOutput(table(["Model, settings", "Here", elsewhere(page.suite)], rows, caption))
