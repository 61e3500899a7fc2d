"""Tables 1, 2 and 7 to 11: accuracies of image models, and of the encoder in their role."""

from collections.abc import Callable, Sequence
from itertools import product

import pandas as pd

from reproduction.report import paper, tables
from reproduction.report.claims import NO_POOL
from reproduction.report.evidence import Evidence
from reproduction.report.html import NOT_RUN, PageOutput, tabulate
from reproduction.report.pages.reproduced import against_printed

LEGEND = "Arrows: against the merger. sd: over seeds. Bold: best of a block."
EXTENDED_MERGERS = ("task_arithmetic", "wudi")  # of Table 2


def answer(number: str, *experiments: Evidence) -> PageOutput:
    """Return FeatCal minus its merger, with the share of the gap, and minus the better adapter."""
    head = ["FeatCal after", "The paper: − merger", "− better adapter"]
    settings: set[str] = set()
    for data in experiments:
        head += [f"{data.model_title}: − merger", "− better adapter"]
        settings |= {*tables.settings_of(data)}
    rows = []
    for (upstream, name), setting in product(tables.UPSTREAMS.items(), sorted(settings)):
        first = setting == min(settings)
        cells = [printed_gain(number, upstream, rest) for rest in (["merged"], tables.ADAPTERS)]
        cells[0] += f"<small>{printed_share(number, upstream)} %</small>"
        cells = cells if first else ["", ""]
        for data in experiments:
            over_merger, over_adapter = tables.gains(data, upstream, setting)
            recovered = share_of(data, upstream, setting)
            over_merger += "" if recovered == NOT_RUN else f"<small>{recovered} %</small>"
            cells += [over_merger, over_adapter]
        label = f"{name} <small>{tables.SHORT[setting]}</small>"
        rows.append(("fc-merger" if first else "fc-calibrated", [label, *cells]))
    caption = (
        "Differences of the average accuracy, points. Above, below: by more than two standard"
        " errors, samples paired. %: share of the gap between merger and experts. Better adapter:"
        " the higher average of Surgery and ProbSurgery."
    )
    return tabulate(head, rows, caption, "fc-long")


def printed_gain(
    number: str, upstream: str, others: Sequence[str], model: str = "", column: str = paper.AVERAGE
) -> str:
    """Return FeatCal minus the best of others, as printed, and as corrected if that differs."""

    def gain(read: Callable[..., pd.DataFrame]) -> float:
        which = {"model": model, "read": read}
        rows = (paper.paper_row(number, upstream, m, **which) for m in ("featcal", *others))
        featcal, *compared = (float(row[column]) for row in rows)
        return featcal - max(compared)

    value, fixed = (f"{gain(read):+.1f}" for read in (paper.paper_table, paper.corrected_table))
    return value if value == fixed else f"{value} <small>{fixed} corrected</small>"


def measured(data: Evidence) -> PageOutput:
    """Return the accuracy table of one experiment in the paper's order of rows."""
    caption = f"Top-1 accuracy (%) on test {data.inputs} — {data.model_name}.{tables.settings_note(data)} {LEGEND}"
    titles = {task: data.title(task) for task in data.tasks}
    html = tables.accuracy_table(tables.accuracy_rows(data), titles, caption)
    number = paper.PRINTED.get((data.role, data.pool), "")
    return PageOutput(html + against_printed(data, number))


def printed(number: str) -> PageOutput:
    """Return the paper's printed table, in a fold, with the cells in doubt marked."""
    columns, rows = tables.paper_rows(number)
    caption = f"The paper’s {paper.table_name(number)}, as printed: CLIP models on image data sets"
    titles = {column: paper.TASKS.get(column, column) for column in columns}
    return tables.printed_table(rows, titles, caption)


def share_of(data: Evidence, upstream: str, setting: str) -> str:
    """Return the measured share of one merger at one setting."""
    recovered = tables.recovered_share(data, upstream, "featcal", setting)
    return NOT_RUN if recovered is None else f"{recovered:.0f}"


def printed_share(number: str, upstream: str, model: str = "") -> str:
    """Return the paper's share, as printed, and as corrected if that differs."""
    shares = (tables.paper_recovered(number, upstream, fixed, model) for fixed in (False, True))
    value, fixed = ("–" if share is None else f"{share:.0f}" for share in shares)
    return value if value == fixed else f"{value} ({fixed} corrected)"


def columns_of(suite: str, role: str) -> dict[str, Evidence]:
    """Return the experiments of Table 2 by the printed heading of their columns."""
    if role == paper.REAL:
        return {f"{pool} tasks": Evidence(suite, paper.REAL, pool) for pool in tables.POOLS}
    return {column: Evidence(suite, *experiment) for column, experiment in paper.EXTENDED.items()}


def extended_answer(suite: str) -> PageOutput:
    """Return FeatCal minus the better adapter for every column of Table 2, printed and measured."""
    rows, columns = [], columns_of(suite, paper.IMAGES)
    sources = {"synthetic models" if suite == "mini" else "here": columns}
    for role in (paper.REAL, paper.VISION):
        sources[paper.model_name(role, suite)] = {
            column: Evidence(suite, role, pool)
            for column, (_, pool) in paper.EXTENDED.items()
            if "B/32" in column and (role, pool) != NO_POOL
        }
    for upstream in EXTENDED_MERGERS:
        name = tables.UPSTREAMS[upstream]
        gains = (printed_gain("table02", upstream, tables.ADAPTERS, column=c) for c in columns)
        rows.append(("fc-merger", [f"{name} <small>the paper</small>", *gains]))
        for (source, by_column), setting in product(sources.items(), tables.settings_shown(suite)):
            if setting != "paper" and {d.role for d in by_column.values()} & {*tables.UNTUNED}:
                continue
            margins = {c: tables.gains(data, upstream, setting)[1] for c, data in by_column.items()}
            label = f"{name} <small>{source}, {tables.SHORT[setting]}</small>"
            rows.append(("fc-calibrated", [label, *(margins.get(c, "–") for c in columns)]))
    caption = (
        "FeatCal minus the better adapter, average accuracy, points."
        " Above, below: by more than two standard errors."
    )
    return tabulate(["After", *columns], rows, caption, "fc-long")


def extended(suite: str, role: str) -> PageOutput:
    """Return Table 2: averages at the printed and the tuned settings, a column per experiment."""
    settings, columns = tables.settings_shown(suite), columns_of(suite, role)

    def cells(upstream: str, method: str, setting: str) -> tables.Cells:
        key = tables.model_key(upstream, method, setting)
        return tables.cells_of({name: tables.average(data, key) for name, data in columns.items()})

    rows = tables.rows_in_order(cells, tables.references_of("table02"), EXTENDED_MERGERS, settings)
    kind = "synthetic, in the roles of both CLIP models" if suite == "mini" else "CLIP models"
    name = paper.model_name(role, suite) if role == paper.REAL else kind
    caption = f"Average top-1 accuracy (%) — {name}. {LEGEND}"
    html = tables.accuracy_table(rows, {name: name for name in columns}, caption, average=False)
    number = "" if role == paper.REAL else "table02"
    return PageOutput(html + against_printed(None, number, suite))
