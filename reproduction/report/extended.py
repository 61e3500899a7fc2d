"""Table 2: the averages of the five roles and pools beside the first table's, put together from their own result files."""

from reproduction.report import tables
from reproduction.report.accuracies import LEGEND, folded_table
from reproduction.report.estimate import estimate
from reproduction.report.evidence import Evidence, select
from reproduction.report.markup import PageOutput, accuracy_table, note
from reproduction.report.reproduced import against_printed
from reproduction.report.show import label, origin
from reproduction.report.values import EXTENDED, SIZES

UPSTREAMS = ("task_arithmetic", "wudi")


def rows(suite: str) -> list[tables.Row]:
    """The rows of Table 2, every cell a mean over tasks (and seeds) at the suite's main settings."""
    main = tables.settings_shown(suite)[0]

    def look(upstream: str, method: str) -> tuple[dict[str, tables.Cell], bool]:
        key = tables.model_key(upstream, method, main)
        found = {name: estimate(select(Evidence(suite, *place).table("scores"), key)) for name, place in EXTENDED.items()}
        cells = {name: tables.Cell(e.mean, e.spread) for name, e in found.items() if e is not None}
        return cells, any(e is not None and e.one_run for e in found.values())

    return tables.rows_in_order(look, tables.references_of("table02"), UPSTREAMS)


def averages(suite: str) -> PageOutput:
    """Table 2 in the paper's order of rows and columns."""
    at = tables.SETTING_LABELS[tables.settings_shown(suite)[0]]
    caption = f"Average top-1 accuracy (%) on test images, at the {at} — {label(suite)}. {LEGEND}"
    caption += " One run: in at least one column."
    titles = [f"{pool} tasks, {SIZES[role]}" for role, pool in EXTENDED.values()]
    html = accuracy_table(rows(suite), list(EXTENDED), titles, caption, average=False)[0]
    return PageOutput(html + against_printed("table02", suite))


def printed() -> PageOutput:
    """The paper's Table 2, folded away, with the cells in doubt marked."""
    columns, found = tables.paper_rows("table02")
    caption = "The paper’s Table 2, as printed: real CLIP models on real data"
    return PageOutput(folded_table(*accuracy_table(found, columns, columns, caption, average=False)))


def gains(suite: str) -> PageOutput:
    """The gain of everything that calibrates by number of tasks, drawn; or a note that it was not run."""
    from reproduction.report import figures, gains_by_tasks  # matplotlib takes a second to import; only pages with figures pay

    drawn = gains_by_tasks.drawn(suite)
    if drawn is None:
        return PageOutput(note(f"○ not run: no averages to compare in the results of the {label(suite)}."))
    return PageOutput(picture={"image/svg+xml": figures.svg(drawn)}, text=f"gains ({label(suite)})")


def provenance(suite: str) -> PageOutput:
    """Files, run records and commands behind the page."""
    return PageOutput(origin("table02", suite, [("clip_b32", "8"), *EXTENDED.values()]))
