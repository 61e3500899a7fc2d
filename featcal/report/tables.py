"""The accuracy tables in the paper's row order: one model of numbers for our results and for the paper's printed values.

Turns rows of result files into rows of cells; how a cell looks is not decided here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pandas as pd

from featcal.report.errata import reason
from featcal.report.estimate import estimate
from featcal.report.evidence import Evidence, select
from featcal.report.values import AVERAGE, TASKS, paper_table

REFERENCES = {"base": "Pre-trained", "expert": "Fine-tuned (STL)", "multitask": "Multi-task (MTL)"}
UPSTREAMS = {
    "average": "Simple Averaging", "task_arithmetic": "Task Arithmetic", "adamerging": "AdaMerging", "wudi": "WUDI-Merging",
}  # fmt: skip
MERGERS = UPSTREAMS | {
    "ties": "TIES-Merging", "regmean": "RegMean", "regmean_plus_plus": "RegMean++", "lot": "LOT Merging, from its formula",
    "wudi_closed_form": "WUDI-Merging, closed form",
}  # fmt: skip
METHODS = {"surgery": "w/ Surgery", "prob_surgery": "w/ ProbSurgery", "featcal": "w/ FeatCal"}
SETTING_LABELS = {"suite": "suite’s settings", "paper": "paper’s settings"}


@dataclass(frozen=True)
class Cell:
    """One number of a table, in percent; change: against the block's merger; spread: standard deviation over seeds."""

    value: float
    spread: float | None = None
    change: float | None = None
    best: bool = False
    doubt: str = ""


@dataclass(frozen=True)
class Row:
    """One model: kind is reference, merger or calibrated; no cells means that it was not run."""

    label: str
    kind: str
    upstream: str
    cells: dict[str, Cell]
    one_run: bool = False


Lookup = Callable[[str, str, str], tuple[dict[str, Cell], bool]]  # upstream, method, setting → cells by column, one run


def settings_shown(suite: str) -> tuple[str, ...]:
    """The settings that a table of this suite has rows for: of FeatCal, and of the adapters' size."""
    return ("paper",) if suite == "paper" else ("suite", "paper")


def accuracy_rows(evidence: Evidence) -> list[Row]:
    """Every row of the paper's table, filled from the results; a row that was not run has no cells."""

    def look(upstream: str, method: str, setting: str) -> tuple[dict[str, Cell], bool]:
        return measured_cells(evidence, upstream, method, setting)

    return _rows(look, settings_shown(evidence.suite))


def paper_rows(table: str) -> tuple[list[str], list[Row]]:
    """The paper's printed table: its tasks, and the same rows with the printed values and why some are in doubt."""
    frame = paper_table(table)

    def look(upstream: str, method: str, setting: str) -> tuple[dict[str, Cell], bool]:
        rows = select(frame, {"upstream": upstream, "method": method})
        printed = zip(rows["task"], rows["value"], strict=True)
        return {task: Cell(value, doubt=reason(table, upstream, method, task)) for task, value in printed}, False

    return [t for t in TASKS if t in set(frame["task"])], _rows(look, ("",))


def _rows(look: Lookup, settings: tuple[str, ...]) -> list[Row]:
    rows = [Row(label, "reference", "", *look("", method, "")) for method, label in REFERENCES.items()]
    for upstream, name in UPSTREAMS.items():
        merger = Row(name, "merger", upstream, *look(upstream, "merged", ""))
        block = [merger]
        for method, label in METHODS.items():
            for setting in settings:
                suffix = f", {SETTING_LABELS[setting]}" if setting else ""
                row = Row(label + suffix, "calibrated", upstream, *look(upstream, method, setting))
                block.append(with_changes(row, merger))
        rows += _with_best(block)
    return rows


def measured_cells(evidence: Evidence, upstream: str, method: str, setting: str) -> tuple[dict[str, Cell], bool]:
    """Mean and spread of one model on every task and on average, and whether a single draw is behind them."""
    frame = select(evidence.table("scores"), {"upstream": upstream, "method": method, "setting": setting})
    parts: dict[str, pd.DataFrame] = {task: frame[frame["task"] == task] for task in evidence.tasks} | {AVERAGE: frame}
    found = {column: estimate(rows) for column, rows in parts.items()}
    one_run = any(e is not None and e.one_run for e in found.values())
    return {column: Cell(e.mean, e.spread) for column, e in found.items() if e is not None}, one_run


def with_changes(row: Row, merger: Row) -> Row:
    """The row with its changes against the merger it starts from."""
    cells = {
        column: replace(cell, change=cell.value - merger.cells[column].value) if column in merger.cells else cell
        for column, cell in row.cells.items()
    }
    return replace(row, cells=cells)


def _with_best(block: list[Row]) -> list[Row]:
    """Mark the highest value of every column of a block, as it is printed (equal to one decimal is equal)."""
    columns = {column for row in block for column in row.cells}
    top = {column: max(round(row.cells[column].value, 1) for row in block if column in row.cells) for column in columns}
    alone = sum(bool(row.cells) for row in block) < 2
    return [
        replace(row, cells={c: replace(cell, best=not alone and round(cell.value, 1) == top[c]) for c, cell in row.cells.items()})
        for row in block
    ]


@dataclass(frozen=True)
class Recovered:
    """Which share of the way from a merger to the experts FeatCal goes, in percent; spread: over seeds."""

    upstream: str
    setting: str
    share: float
    spread: float | None
    one_run: bool


def recovered(evidence: Evidence) -> list[Recovered]:
    """(FeatCal − merger) / (experts − merger) of the averages, per merger and settings that were run."""
    scores = evidence.table("scores")
    expert = estimate(select(scores, {"method": "expert"}))
    found = []
    for upstream in UPSTREAMS:
        merged = estimate(select(scores, {"upstream": upstream, "method": "merged"}))
        for setting in settings_shown(evidence.suite):
            ours = estimate(select(scores, {"upstream": upstream, "method": "featcal", "setting": setting}))
            if not (expert and merged and ours) or expert.mean <= merged.mean:
                continue
            share = 100 / (expert.mean - merged.mean)
            spread = None if ours.spread is None else ours.spread * share
            found.append(Recovered(upstream, setting, (ours.mean - merged.mean) * share, spread, ours.one_run))
    return found


def paper_recovered(table: str, upstream: str) -> float | None:
    """The same share from the paper's printed averages; None where a cell is missing."""
    frame = select(paper_table(table), {"task": AVERAGE}).set_index(["upstream", "method"])["value"]
    keys = [("", "expert"), (upstream, "merged"), (upstream, "featcal")]
    if any(key not in frame.index for key in keys):
        return None
    expert, merged, ours = (float(frame[key]) for key in keys)
    return 100 * (ours - merged) / (expert - merged)
