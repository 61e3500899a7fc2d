"""The accuracy tables in the paper's row order: one model of numbers for our results and for the
paper's printed values.

Turns rows of result files into rows of cells; how a cell looks is not decided here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

import pandas as pd

from reproduction.report.evidence import Evidence, select
from reproduction.report.html import arrow, table
from reproduction.report.paper import (
    AVERAGE,
    PRINTED,
    TASKS,
    corrected_table,
    paper_row,
    paper_table,
    reason,
)
from reproduction.report.statistics import Estimate, estimate

REFERENCES = {"base": "Pre-trained", "expert": "Fine-tuned (STL)", "multitask": "Multi-task (MTL)"}
UPSTREAMS = {
    "average": "Simple Averaging", "task_arithmetic": "Task Arithmetic", "adamerging": "AdaMerging", "wudi": "WUDI-Merging",
}  # fmt: skip
MERGERS = UPSTREAMS | {
    "ties": "TIES-Merging", "regmean": "RegMean", "regmean_plus_plus": "RegMean++", "lot": "LOT Merging, from its formula",
    "wudi_closed_form": "WUDI-Merging, closed form", "adamerging_1000": "AdaMerging, 1,000 steps",
}  # fmt: skip
NAMES = {"surgery": "Surgery", "prob_surgery": "ProbSurgery", "featcal": "FeatCal"}
METHODS = {method: f"w/ {name}" for method, name in NAMES.items()}
SHIFT = "mean_shift"  # an adapter that the paper has no row for
SETTING_LABELS = {"suite": "suite’s settings", "paper": "paper’s settings"}
ADAPTER_LABELS = {
    "suite": "adapters in proportion",
    "paper": "adapters of the published code’s size",
}
LARGER = ("14", "20")  # pools that every suite runs at its main settings only


@dataclass(frozen=True)
class Cell:
    """One number of a table, in percent; change: against the block's merger; spread: standard
    deviation over seeds.
    """

    value: float
    spread: float | None = None
    change: float | None = None
    best: bool = False
    doubt: str = ""


@dataclass(frozen=True)
class Row:
    """One model: kind is reference, merger or calibrated; no cells means that it was not run. A
    heading names the rows below.
    """

    label: str
    kind: str
    upstream: str
    cells: dict[str, Cell]
    one_run: bool = False


Key = tuple[str, str, str]  # upstream, method, setting
Lookup = Callable[
    [str, str], tuple[dict[str, Cell], bool]
]  # upstream, method → cells by column, whether one run


def settings_shown(suite: str, pool: str = "8") -> tuple[str, ...]:
    """The settings that results of this suite and pool have, of FeatCal and of the adapters' size;
    the main one comes first.
    """
    return ("paper",) if suite == "paper" else ("suite",) if pool in LARGER else ("suite", "paper")


def row_name(upstream: str, method: str) -> str:
    """How pages call a row of a printed table."""
    return f"{UPSTREAMS.get(upstream, '')} {(METHODS | REFERENCES).get(method, '')}".strip()


def setting_label(setting: str) -> str:
    """What a column or table at one setting is at."""
    return f"at the {SETTING_LABELS[setting]}"


def accuracy_rows(evidence: Evidence, setting: str = "") -> list[Row]:
    """Every row of the paper's table from the main settings; or at another setting the blocks
    without the references.

    A row that was not run has no cells; a reference that the paper's table lacks, such as the
    multi-task model of the larger pools, is left out.
    """
    chosen = setting or settings_shown(evidence.suite, evidence.pool)[0]
    printed = PRINTED.get((evidence.role, evidence.pool))
    references = () if setting else references_of(printed) if printed else tuple(REFERENCES)
    return rows_in_order(
        lambda u, m: measured_cells(evidence, model_key(u, m, chosen)), references, UPSTREAMS
    )


def references_of(table: str) -> tuple[str, ...]:
    """The references for which a printed table has a row."""
    printed = set(paper_table(table)["method"])
    return tuple(method for method in REFERENCES if method in printed)


def paper_rows(table: str, model: str = "") -> tuple[list[str], list[Row]]:
    """The paper's printed table: its columns, and its rows with the printed values and why some are
    in doubt.

    model: by its printed name, where the table has two.
    """
    frame = paper_table(table, model)

    def look(upstream: str, method: str) -> tuple[dict[str, Cell], bool]:
        printed = paper_row(table, upstream, method, model).items()
        return {
            task: Cell(value, doubt=reason(table, upstream, method, task, model))
            for task, value in printed
        }, False

    upstreams = [upstream for upstream in UPSTREAMS if upstream in set(frame["upstream"])]
    columns = [t for t in TASKS if t in set(frame["task"])] or [
        c for c in dict.fromkeys(frame["task"]) if c != AVERAGE
    ]
    return columns, rows_in_order(look, references_of(table), upstreams)


def rows_in_order(look: Lookup, references: Iterable[str], upstreams: Iterable[str]) -> list[Row]:
    """References, then a block per merger: itself, and what calibrates it with its changes; the
    best of a block is marked.
    """
    rows = [Row(REFERENCES[method], "reference", "", *look("", method)) for method in references]
    for upstream in upstreams:
        merger = Row(UPSTREAMS[upstream], "merger", upstream, *look(upstream, "merged"))
        calibrated = [
            Row(label, "calibrated", upstream, *look(upstream, method))
            for method, label in METHODS.items()
        ]
        rows += with_best([merger, *(with_changes(row, merger) for row in calibrated)])
    return rows


def measured_cells(evidence: Evidence, key: Key) -> tuple[dict[str, Cell], bool]:
    """Mean and spread of one model on every task and on average, and whether a single draw is
    behind them.
    """
    return cells_of(by_task(evidence, key))


def cells_of(found: Mapping[str, Estimate | None]) -> tuple[dict[str, Cell], bool]:
    """The cells of a row, by column, and whether a single draw is behind one of them."""
    known = {column: one for column, one in found.items() if one is not None}
    return {column: Cell(one.mean, one.spread) for column, one in known.items()}, any(
        one.one_run for one in known.values()
    )


def model_key(upstream: str, method: str, setting: str) -> Key:
    """What names one model; the setting counts for what calibrates, references and mergers have
    none.
    """
    return upstream, method, setting if method in (*METHODS, SHIFT) else ""


def by_task(ours: Evidence, key: Key) -> dict[str, Estimate]:
    """Estimates of one model by task that was run, and on average."""
    whole = average(ours, key)
    if whole is None:
        return {}
    found = {task: estimate(rows_of(ours, key, task=task)) for task in ours.tasks}
    return {task: one for task, one in found.items() if one} | {AVERAGE: whole}


def rows_of(ours: Evidence, key: Key, file: str = "scores", **more: str) -> pd.DataFrame:
    """The rows of one model.   more: by column, what else they have in common."""
    return select(
        ours.table(file), dict(zip(("upstream", "method", "setting"), key, strict=True)) | more
    )


def with_changes(row: Row, merger: Row) -> Row:
    """The row with its changes against the merger it starts from."""
    cells = {
        column: replace(cell, change=cell.value - merger.cells[column].value)
        if column in merger.cells
        else cell
        for column, cell in row.cells.items()
    }
    return replace(row, cells=cells)


def with_best(block: list[Row]) -> list[Row]:
    """Mark the highest value of every column of a block, as it is printed (equal to one decimal is
    equal).
    """
    columns = {column for row in block for column in row.cells}
    top = {
        column: max(round(row.cells[column].value, 1) for row in block if column in row.cells)
        for column in columns
    }
    alone = sum(bool(row.cells) for row in block) < 2
    return [
        replace(
            row,
            cells={
                c: replace(cell, best=not alone and round(cell.value, 1) == top[c])
                for c, cell in row.cells.items()
            },
        )
        for row in block
    ]


def average(ours: Evidence, key: Key, file: str = "scores") -> Estimate | None:
    """The mean over tasks and seeds of one row; None where it was not run."""
    return estimate(rows_of(ours, key, file))


@dataclass(frozen=True)
class Recovered:
    """Which share of the way from a merger to the experts FeatCal goes, in percent; spread: over
    seeds.
    """

    upstream: str
    setting: str
    share: float
    spread: float | None
    one_run: bool


def share(merged: float | None, ours: float | None, expert: float | None) -> float | None:
    """(ours − merged) / (expert − merged), in percent; None where one is unknown or there is no way
    to go.
    """
    if merged is None or ours is None or expert is None or expert <= merged:
        return None
    return 100 * (ours - merged) / (expert - merged)


def recovered(evidence: Evidence) -> list[Recovered]:
    """(FeatCal − merger) / (experts − merger) of the averages, per merger and settings that were
    run.
    """
    expert = average(evidence, ("", "expert", ""))
    found = []
    for upstream in UPSTREAMS:
        merged = average(evidence, (upstream, "merged", ""))
        for setting in settings_shown(evidence.suite, evidence.pool):
            ours = average(evidence, (upstream, "featcal", setting))
            went = share(*(e and e.mean for e in (merged, ours, expert)))
            if went is None or not (expert and merged and ours):
                continue
            spread = (
                None if ours.spread is None else 100 * ours.spread / (expert.mean - merged.mean)
            )
            found.append(Recovered(upstream, setting, went, spread, ours.one_run))
    return found


def paper_recovered(
    table: str, upstream: str, corrected: bool = False, model: str = "", method: str = "featcal"
) -> float | None:
    """The same share from the paper's averages, as printed or corrected where that can be told;
    None where a cell is missing.

    method: the row whose share it is, featcal or an adapter's.
    """
    read = corrected_table if corrected else paper_table
    keys = ((upstream, "merged"), (upstream, method), ("", "expert"))
    return share(*(paper_row(table, *key, model, read=read).get(AVERAGE) for key in keys))


def number(cell: Cell | None, marks: list[str]) -> str:
    """A cell of an accuracy table; a doubtful one gets the next mark, and its reason goes to the
    end of `marks`.
    """
    if cell is None:
        return "<td>–</td>"
    value = f"<strong>{cell.value:.1f}</strong>" if cell.best else f"{cell.value:.1f}"
    if cell.doubt:
        if cell.doubt not in marks:
            marks.append(cell.doubt)
        value += f'<sup class="fc-doubt" title="{escape(cell.doubt)}">{marks.index(cell.doubt) + 1}</sup>'
    below = [arrow(cell.change)] if cell.change is not None else []
    below += [f"sd&nbsp;{cell.spread:.1f}"] if cell.spread is not None else []
    return f"<td>{value}{''.join(f'<small>{line}</small>' for line in below)}</td>"


def accuracy_table(
    rows: Sequence[Row],
    columns: Sequence[str],
    titles: Sequence[str],
    caption: str,
    average: bool = True,
) -> tuple[str, list[str]]:
    """An accuracy table and the reasons of its marked cells, in the order of their marks; `average`
    adds that column.
    """
    if average:
        columns, titles = [*columns, AVERAGE], [*titles, "Average"]
    marks: list[str] = []
    body: list[tuple[str, list[str]]] = []
    for row in rows:
        if row.kind == "heading":
            body.append(("fc-merger", [escape(row.label), f'<td colspan="{len(columns)}"></td>']))
            continue
        label = escape(row.label) + (
            ' <small class="fc-run">one seed</small>' if row.one_run else ""
        )
        empty = [f'<td class="fc-none" colspan="{len(columns)}">not run</td>']
        cells = [number(row.cells.get(column), marks) for column in columns] if row.cells else empty
        body.append((f"fc-{row.kind}", [label, *cells]))
    return table(
        ["Model", *map(escape, titles)],
        body,
        caption,
        "fc-accuracy fc-averaged" if average else "fc-accuracy",
    ), marks
