"""The page of known differences and errata: cells of the paper in doubt with reason and evidence,
and how suites differ.

The evidence is computed from the printed tables; the lists stand in errata.yaml, passages.yaml and
differences.yaml.
"""

from collections import Counter
from collections.abc import Callable
from html import escape

import pandas as pd

from reproduction.report import page as pages
from reproduction.report.html import PageOutput, fold, table
from reproduction.report.overview import place_link
from reproduction.report.paper import (
    AVERAGE,
    Erratum,
    errata,
    paper_row,
    paper_table,
    passages,
    title_of,
)
from reproduction.report.tables import row_name

ACCURACIES = (
    "table01",
    "table07",
    "table08",
    "table09",
    "table10",
    "table11",
    "table03",
)  # task by task, several rows
ITEMS = {"mrpc": 408}  # test items, of tasks with a score that no count of right answers gives
MEANING = {
    "average": "the printed mean is not the mean of its row",
    "rotated": "values stand under the wrong tasks",
    "reference": "a published checkpoint, or another table of the paper, has another value",
    "foreign": "the row looks like another method’s",
    "unattainable": "no number of right answers gives the value",
    "contradiction": "two places of the paper disagree",
    "change": "the printed change against the merger is not the difference of the two printed values",
}


def kinds(suite: str) -> PageOutput:
    """What is meant by each kind of doubt, and how many rows of the paper are in it."""
    count = Counter(entry.kind for entry in errata())
    rows = [
        ("", [escape(kind), escape(meaning), str(count[kind])])
        for kind, meaning in MEANING.items()
        if count[kind]
    ]
    rows.append(("fc-total", ["all", "", str(sum(count.values()))]))
    return PageOutput(
        table(
            ["Kind", "What it means", "Rows"],
            rows,
            "Kinds of doubt — the paper’s tables",
            "fc-words",
        )
    )


def cells(suite: str) -> PageOutput:
    """Every row of the paper with cells in doubt: as printed, what would fit, why, and what the
    tables themselves say.
    """
    rows = []
    for entry in sorted(errata(), key=lambda e: e.table):
        row = " · ".join(filter(None, (row_name(*entry.row), entry.model)))
        place = f"{place_link(entry.table)}<small>{escape(row)}</small>"
        evidence = "".join(f"<small>{escape(words)}</small>" for words in evidence_of(entry))
        rows.append(("", [place, entry.kind, _values(entry), escape(entry.reason) + evidence]))
    head = ["Row", "Kind", "Cells: printed, what would fit", "Why, and what the tables say"]
    return PageOutput(
        table(head, rows, "Cells that cannot be right — the paper’s tables", "fc-words")
    )


def contradicted(suite: str) -> PageOutput:
    """Every sentence or formula of the paper that another place of it, or a fact, contradicts."""
    rows = [
        ("", [escape(entry.where), escape(entry.says), escape(entry.but)]) for entry in passages()
    ]
    caption = "Sentences and formulas that cannot be right — the paper’s text"
    return PageOutput(
        table(["Where", "What it says", "What contradicts it"], rows, caption, "fc-words")
    )


def _values(entry: Erratum) -> str:
    """The cells one per line: printed, and behind an arrow what fits where that can be told."""
    row = printed_row(entry)
    lines = []
    for cell in entry.cells:
        fits = f" → {_shown(entry.corrected[cell])}" if cell in entry.corrected else ""
        printed = " and ".join(
            _shown(float(value)) for value in row[row.index == cell]
        )  # two where a table has two models
        lines.append(f'<span class="fc-whole">{escape(column_title(cell))} {printed}{fits}</span>')
    return "<br>".join(lines)


def _shown(value: float) -> str:
    """As the paper prints values, with the second decimal where there is one."""
    return f"{value:.1f}" if round(value, 1) == value else f"{value:g}"


def differences(suite: str) -> PageOutput:
    """What differs from the paper in this suite, of image models and of language models; the real
    encoder's first.
    """
    return pages.differences("real") + _differences(suite)


def _differences(suite: str) -> PageOutput:
    listed = {
        "differences": "Known differences, image models",
        "language": "Known differences, language models",
    }
    told = [name for name in listed if name in pages.suites().get(suite, {})]
    return PageOutput(
        "".join(pages.differences(suite, about, listed[about]).html for about in told)
    )


def other_suites(suite: str) -> PageOutput:
    """The same of every other suite, folded away."""
    others = [name for name in pages.suites() if name not in (suite, "real", "smoke")]
    return PageOutput(
        "".join(fold(f"The {pages.label(name)}", _differences(name).html) for name in others)
    )


def provenance(suite: str) -> PageOutput:
    """Where the lists stand, and what makes this page."""
    names = ("differences", "errata", "passages")
    lists = ", ".join(f"<code>reproduction/report/{name}.yaml</code>" for name in names)
    rows = [
        ("", ["Lists", lists]),
        ("", ["The paper’s values", "<code>reproduction/report/paper_tables/</code>"]),
    ]
    return PageOutput(
        table(
            ["", ""],
            rows + pages.commands("differences"),
            f"Provenance — {pages.label(suite)}",
            "fc-words",
        )
    )


def printed_row(entry: Erratum) -> pd.Series:
    """The printed row of an erratum, by task or column."""
    upstream, method = entry.row
    return _row(entry.table, upstream, method, entry.model)


def evidence_of(entry: Erratum) -> list[str]:
    """Sentences, one per finding, that the printed tables themselves yield; none where only the
    reason speaks.
    """
    return _FINDINGS.get(entry.kind, _elsewhere)(entry)


def column_title(cell: str) -> str:
    """How a column is called on a page."""
    return "Average" if cell == AVERAGE else title_of(cell) or cell


def _row(table: str, upstream: str, method: str, model: str = "") -> pd.Series:
    frame = paper_table(table)
    if "samples_per_task" in frame:
        found = frame[frame["method"] == method]
        return pd.Series(found["mean"].values, index=found["samples_per_task"].astype(str))
    if "task" not in frame:  # a table of one study, whose columns are the cells
        return frame[frame["method"] == method].iloc[0].drop("method")
    return paper_row(table, upstream, method, model)


def _average(entry: Erratum) -> list[str]:
    row = printed_row(entry)
    tasks = row.drop(AVERAGE)
    return [
        f"The mean of the {len(tasks)} printed cells is {tasks.mean():.2f}; printed is {row[AVERAGE]:.1f}."
    ]


def _rotated(entry: Erratum) -> list[str]:
    """How unlike the table's other rows the cells are, as printed and shifted back; the row's own
    level does not count.
    """
    frame = paper_table(entry.table, entry.model)
    moved = {
        tuple(e.row)
        for e in errata()
        if e.kind == "rotated" and (e.table, e.model) == (entry.table, entry.model)
    }
    others = frame[
        [pair not in moved for pair in zip(frame["upstream"], frame["method"], strict=True)]
    ]
    profile = others.groupby("task")["value"].mean()
    row, cells = printed_row(entry), entry.cells
    printed = pd.Series([row[cell] - profile[cell] for cell in cells]).std()
    mended = pd.Series([entry.corrected[cell] - profile[cell] for cell in cells]).std()
    return [
        f"Against the columns’ means over the rows that are not shifted, the {len(cells)} cells scatter by {printed:.1f} as "
        f"printed and by {mended:.1f} shifted back (standard deviation)."
    ]


def _foreign(entry: Erratum) -> list[str]:
    """The row of the same table that is nearest, task by task."""
    if entry.table not in ACCURACIES:
        return _elsewhere(entry)
    row = printed_row(entry).drop(AVERAGE)
    frame = paper_table(entry.table)
    apart = {}
    for pair in {pair for pair in zip(frame["upstream"], frame["method"], strict=True)} - {
        tuple(entry.row)
    }:
        difference = (_row(entry.table, *pair).drop(AVERAGE) - row).abs()
        apart[pair] = (float(difference.mean()), float(difference.max()))
    (upstream, method), (mean, most) = min(apart.items(), key=lambda item: item[1])
    return [
        f"Nearest row of the table: {row_name(upstream, method)}, {mean:.2f} away on average, {most:.1f} at most."
    ]


def _unattainable(entry: Erratum) -> list[str]:
    found = []
    for cell in entry.cells:
        items, value = ITEMS[cell], printed_row(entry)[cell]
        right = int(value / 100 * items)
        near = " and ".join(f"{100 * count / items:.2f}" for count in (right, right + 1))
        found.append(
            f"Of {items} items {right} and {right + 1} right give {near}; printed is {value:.1f}."
        )
    return found


def _change(entry: Erratum) -> list[str]:
    row, before = printed_row(entry), _row(entry.table, entry.row[0], "merged", entry.model)
    pairs = ((row[cell], before[cell]) for cell in entry.cells)
    return [f"{after:.1f} − {start:.1f} = {after - start:.1f}." for after, start in pairs]


def _elsewhere(entry: Erratum) -> list[str]:
    """The same cell where another table prints it for the same model, merger and method."""
    if entry.table not in ACCURACIES:
        return []
    model = paper_table(entry.table)["model"].iloc[0]
    found = []
    for cell in (cell for cell in entry.cells if cell != AVERAGE):
        here = printed_row(entry)[cell]
        for other in (
            t for t in ACCURACIES if t != entry.table and paper_table(t)["model"].iloc[0] == model
        ):
            there = _row(other, *entry.row).get(cell)
            if there is not None and there != here:
                found.append(f"{column_title(cell)} is {there:.1f} in Table {int(other[-2:])}.")
    if entry.kind == "reference" and AVERAGE in entry.cells:
        row = printed_row(entry).drop(AVERAGE)
        mended = pd.Series(
            row.to_dict() | {c: v for c, v in entry.corrected.items() if c != AVERAGE}
        )
        found.append(
            f"Mean of the row as printed {row.mean():.1f}, with what fits {mended.mean():.1f}."
        )
    return found


_FINDINGS: dict[str, Callable[[Erratum], list[str]]] = {
    "average": _average, "rotated": _rotated, "foreign": _foreign, "unattainable": _unattainable, "change": _change,
}  # fmt: skip
