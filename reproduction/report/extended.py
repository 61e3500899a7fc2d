"""Table 2: the averages of the five roles and pools beside the first table's, put together from their own result files."""

from reproduction.report import tables
from reproduction.report.accuracies import LEGEND, folded_table
from reproduction.report.estimate import estimate
from reproduction.report.evidence import Evidence, select
from reproduction.report.markup import PageOutput, accuracy_table
from reproduction.report.pages import Page
from reproduction.report.values import EXTENDED, REAL, place_name

UPSTREAMS = ("task_arithmetic", "wudi")


def columns_of(page: Page) -> dict[str, tuple[str, str]]:
    """Columns of the page's table: role and pool by name; of the real encoder all of its pools."""
    real = {pool: (REAL, pool) for pool in ("8", "14", "20")}
    return real if page.role == REAL else EXTENDED


def rows(page: Page) -> list[tables.Row]:
    """The rows of Table 2, every cell a mean over tasks (and seeds) at the suite's main settings."""
    main, columns = tables.settings_shown(page.suite)[0], columns_of(page)

    def look(upstream: str, method: str) -> tuple[dict[str, tables.Cell], bool]:
        key = tables.model_key(upstream, method, main)
        found = {name: estimate(select(Evidence(page.suite, *place).table("scores"), key)) for name, place in columns.items()}
        cells = {name: tables.Cell(e.mean, e.spread) for name, e in found.items() if e is not None}
        return cells, any(e is not None and e.one_run for e in found.values())

    return tables.rows_in_order(look, tables.references_of("table02"), UPSTREAMS)


def averages(page: Page) -> PageOutput:
    """Table 2 in the paper's order of rows and columns."""
    at = tables.SETTING_LABELS[tables.settings_shown(page.suite)[0]]
    caption = f"Average top-1 accuracy (%) on test {page.inputs}, at the {at} — {page.label}. {LEGEND}"
    caption += " One run: in at least one column."
    columns = columns_of(page)
    titles = [place_name(*place) for place in columns.values()]
    html = accuracy_table(rows(page), list(columns), titles, caption, average=False)[0]
    return PageOutput(html + page.against_printed())


def printed() -> PageOutput:
    """The paper's Table 2, folded away, with the cells in doubt marked."""
    columns, found = tables.paper_rows("table02")
    caption = "The paper’s Table 2, as printed: real CLIP models on real data"
    return PageOutput(folded_table(*accuracy_table(found, columns, columns, caption, average=False)))


def gains(page: Page) -> PageOutput:
    """The gain of everything that calibrates by number of tasks, drawn; or a note that it was not run."""
    from reproduction.report import gains_by_tasks  # matplotlib takes a second to import; only pages with figures pay

    return page.drawn(gains_by_tasks.drawn(page), "averages to compare")
