"""What the paper's own tables say about a cell that cannot be right, computed from them: the evidence beside each erratum.

An erratum's reason is typed in errata.yaml; nothing here is. Reads printed values only.
"""

from collections.abc import Callable

import pandas as pd

from reproduction.report.errata import Erratum, errata
from reproduction.report.tables import METHODS, REFERENCES, UPSTREAMS
from reproduction.report.values import AVERAGE, paper_row, paper_table, title_of

ACCURACIES = ("table01", "table07", "table08", "table09", "table10", "table11", "table03")  # task by task, several rows
ITEMS = {"mrpc": 408}  # test items, of tasks with a score that no count of right answers gives


def printed_row(entry: Erratum) -> pd.Series:
    """The printed row of an erratum, by task or column."""
    upstream, method = entry.row
    return _row(entry.table, upstream, method, entry.model)


def evidence_of(entry: Erratum) -> list[str]:
    """Sentences, one per finding, that the printed tables themselves yield; none where only the reason speaks."""
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
    return [f"The mean of the {len(tasks)} printed cells is {tasks.mean():.2f}; printed is {row[AVERAGE]:.1f}."]


def _rotated(entry: Erratum) -> list[str]:
    """How unlike the table's other rows the cells are, as printed and shifted back; the row's own level does not count."""
    frame = paper_table(entry.table, entry.model)
    moved = {tuple(e.row) for e in errata() if e.kind == "rotated" and (e.table, e.model) == (entry.table, entry.model)}
    others = frame[[pair not in moved for pair in zip(frame["upstream"], frame["method"], strict=True)]]
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
    for pair in {pair for pair in zip(frame["upstream"], frame["method"], strict=True)} - {tuple(entry.row)}:
        difference = (_row(entry.table, *pair).drop(AVERAGE) - row).abs()
        apart[pair] = (float(difference.mean()), float(difference.max()))
    (upstream, method), (mean, most) = min(apart.items(), key=lambda item: item[1])
    return [f"Nearest row of the table: {row_name(upstream, method)}, {mean:.2f} away on average, {most:.1f} at most."]


def _unattainable(entry: Erratum) -> list[str]:
    found = []
    for cell in entry.cells:
        items, value = ITEMS[cell], printed_row(entry)[cell]
        right = int(value / 100 * items)
        near = " and ".join(f"{100 * count / items:.2f}" for count in (right, right + 1))
        found.append(f"Of {items} items {right} and {right + 1} right give {near}; printed is {value:.1f}.")
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
        for table in (t for t in ACCURACIES if t != entry.table and paper_table(t)["model"].iloc[0] == model):
            there = _row(table, *entry.row).get(cell)
            if there is not None and there != here:
                found.append(f"{column_title(cell)} is {there:.1f} in Table {int(table[-2:])}.")
    if entry.kind == "reference" and AVERAGE in entry.cells:
        row = printed_row(entry).drop(AVERAGE)
        mended = pd.Series(row.to_dict() | {c: v for c, v in entry.corrected.items() if c != AVERAGE})
        found.append(f"Mean of the row as printed {row.mean():.1f}, with what fits {mended.mean():.1f}.")
    return found


def row_name(upstream: str, method: str) -> str:
    """How a page calls a row of a printed table."""
    above, own = UPSTREAMS.get(upstream, ""), (METHODS | REFERENCES).get(method, "")
    return f"{above} {own}".strip()


_FINDINGS: dict[str, Callable[[Erratum], list[str]]] = {
    "average": _average, "rotated": _rotated, "foreign": _foreign, "unattainable": _unattainable, "change": _change,
}  # fmt: skip
