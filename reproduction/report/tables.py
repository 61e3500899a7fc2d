"""Accuracy tables in the paper's order of rows, of our results and of the printed values."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import product
from typing import Any

import pandas as pd

from reproduction.report import paper
from reproduction.report.evidence import Evidence, select
from reproduction.report.html import PageOutput, arrow, compact, folded, margin, note, table
from reproduction.report.statistics import Estimate, estimate, highest

REFERENCES = {"base": "Pre-trained", "expert": "Fine-tuned (STL)", "multitask": "Multi-task (MTL)"}
UPSTREAMS = {
    "average": "Simple Averaging", "task_arithmetic": "Task Arithmetic", "adamerging": "AdaMerging", "wudi": "WUDI-Merging",
}  # fmt: skip
MERGERS = UPSTREAMS | {
    "ties": "TIES-Merging", "regmean": "RegMean", "regmean_plus_plus": "RegMean++", "lot": "LOT Merging, from its formula",
    "wudi_closed_form": "WUDI-Merging, closed form", "tsv_merge": "TSV-Merge",
    "iso_c": "Iso-C", "task_arithmetic_tuned": "Task Arithmetic, tuned scale",
}  # fmt: skip
NAMES = {"surgery": "Surgery", "prob_surgery": "ProbSurgery", "featcal": "FeatCal"}
ADAPTERS = ("surgery", "prob_surgery")
METHODS = {method: f"w/ {name}" for method, name in NAMES.items()}
SHIFT = "mean_shift"  # an adapter that the paper has no row for
SETTING_LABELS = {"paper": "printed settings", "suite": "tuned on validation rows"}
SHORT = {"paper": "printed", "suite": "tuned", "": ""}
SIZE_NAMES = {"paper": "published", "suite": "smaller", "": ""}  # of adapters
SIZES = {"surgery": "rank", "prob_surgery": "hidden"}  # name of an adapter's size
SYMBOLS = {"ridge": "λ", "anchor_blend": "ρ", "interpolation": "α", "samples": "n"}
UNTUNED = (paper.VISION, paper.LANGUAGE[0])  # roles for which no setting was tuned
LARGER = ("14", "20")  # pools shown task by task at the printed settings alone; Table 2 has both
POOLS = ("8", *LARGER)
COLUMNS = ("upstream", "method", "setting")

Key = tuple[str, str, str]  # values of COLUMNS: one model


@dataclass
class Cell:
    """One number of a table, in percent."""

    value: float
    spread: float | None = None  # standard deviation over seeds
    change: float | None = None  # against the block's merger
    best: bool = False
    doubt: str = ""  # why the printed number may be wrong


@dataclass(frozen=True)
class ModelRow:
    """One model; no cells: it was not run."""

    label: str
    kind: str  # reference, merger, calibrated or heading
    upstream: str
    cells: dict[str, Cell]


Cells = dict[str, Cell]  # by column


def settings_shown(suite: str) -> tuple[str, ...]:
    """Return the settings that a suite runs, the printed ones first."""
    return ("paper",) if suite == "paper" else ("paper", "suite")


def settings_of(data: Evidence) -> tuple[str, ...]:
    """Return the settings that a page shows of a role and pool, the printed ones first."""
    fixed = data.role in UNTUNED or data.pool in LARGER
    return ("paper",) if fixed else settings_shown(data.suite)


def row_name(upstream: str, method: str) -> str:
    """Return how pages call a row of a printed table."""
    return f"{UPSTREAMS.get(upstream, '')} {(METHODS | REFERENCES).get(method, '')}".strip()


def short_name(method: str, setting: str) -> str:
    """Return the short name of a row's settings; for adapters, which were not tuned, of their size."""
    return (SIZE_NAMES if method in ADAPTERS else SHORT)[setting]


def settings_note(data: Evidence) -> str:
    """Return λ, ρ, α and n of FeatCal at each setting, for a caption; empty where not run."""
    runs = [run for run in data.settings().get("calibrate", {}).values() if run.get("calibration")]
    notes = []
    for setting in settings_of(data):
        at_setting = [run["calibration"] | run for run in runs if run["setting"] == setting]
        texts = dict.fromkeys(map(_symbol_values, at_setting))
        notes += [f"{SHORT[setting]} {' or '.join(texts)}"] if texts else []
    return f" FeatCal: {'; '.join(notes)}." if notes else ""


def _symbol_values(values: Mapping[str, float]) -> str:
    return ", ".join(f"{s} {compact(values[key])}" for key, s in SYMBOLS.items() if key in values)


def method_settings(data: Evidence, study: str, method: str, setting: str = "") -> str:
    """Return a method's settings in a study, for the label of its row."""
    record = data.record(study).get("settings") or data.settings(study).get("study", {})
    values = record.get("comparison", {}).get(method)
    if method == "featcal" and setting == "paper":
        values = record.get("at_papers") or values
    if not values:
        return ""
    if method in SIZES:
        return f" <small>{SIZES[method]} {values[SIZES[method]]}, {values['steps']} steps</small>"
    return f" <small>{_symbol_values(values)}</small>"


def accuracy_rows(data: Evidence) -> list[ModelRow]:
    """Return every row of the paper's table, or of the real image model's own mergers."""

    def row_cells(upstream: str, method: str, setting: str) -> Cells:
        return cells_of(by_task(data, model_key(upstream, method, setting)))

    if data.role == paper.VISION:
        scores = data.table("scores")
        references = [method for method in REFERENCES if method in set(scores["method"])]
        mergers = [merger for merger in MERGERS if merger in set(scores["upstream"])]
        return rows_in_order(row_cells, references, mergers, ("paper",))
    printed = paper.PRINTED.get((data.role, data.pool))
    references = references_of(printed) if printed else REFERENCES
    paper_mergers = set(paper.paper_table(printed)["upstream"]) if printed else UPSTREAMS
    mergers = [merger for merger in UPSTREAMS if merger in paper_mergers]
    return rows_in_order(row_cells, references, mergers, settings_of(data))


def references_of(number: str) -> tuple[str, ...]:
    """Return the references for which a printed table has a row."""
    printed = set(paper.paper_table(number)["method"])
    return tuple(method for method in REFERENCES if method in printed)


def paper_rows(number: str, model: str = "") -> tuple[list[str], list[ModelRow]]:
    """Return columns and rows of a printed table, each cell in doubt with the reason."""
    frame = paper.paper_table(number, model)

    def row_cells(upstream: str, method: str, setting: str) -> Cells:
        row, doubt = (number, upstream, method), partial(paper.reason, model=model)
        values = paper.paper_row(*row, model).items()
        return {task: Cell(value, doubt=doubt(*row, task)) for task, value in values}

    upstreams = [upstream for upstream in UPSTREAMS if upstream in set(frame["upstream"])]
    tasks = dict.fromkeys(frame["task"])
    columns = [t for t in paper.TASKS if t in tasks] or [c for c in tasks if c != paper.AVERAGE]
    return columns, rows_in_order(row_cells, references_of(number), upstreams)


def rows_in_order(
    lookup: Callable[[str, str, str], Cells],
    references: Iterable[str],
    upstreams: Iterable[str],
    settings: Sequence[str] = ("",),
) -> list[ModelRow]:
    """Return references, then a block per merger: its row, then each method at each setting.

    lookup: cells by upstream, method and setting.
    """
    rows = [ModelRow(REFERENCES[m], "reference", "", lookup("", m, "")) for m in references]
    for upstream in upstreams:
        merger = ModelRow(MERGERS[upstream], "merger", upstream, lookup(upstream, "merged", ""))
        block = [merger]
        for setting, (method, label) in product(settings if merger.cells else (), METHODS.items()):
            name = f"{label}, {short_name(method, setting)}" if len(settings) > 1 else label
            row = ModelRow(name, "calibrated", upstream, lookup(upstream, method, setting))
            block.append(with_changes(row, merger))
        rows += with_best(block)
    return rows


def cells_of(estimates: Mapping[str, Estimate | None]) -> Cells:
    return {column: Cell(v.mean, v.spread) for column, v in estimates.items() if v}


def model_key(upstream: str, method: str, setting: str) -> Key:
    """Return the key of one model; references and mergers have no setting."""
    return upstream, method, setting if method in (*METHODS, SHIFT) else ""


def by_task(data: Evidence, key: Key) -> dict[str, Estimate]:
    """Return estimates of one model by task that was run, and on average.

    Of the Llamas' experts: the highest of base and experts on every test.
    """
    if key != ("", "expert", "") or data.pool != "mergebench":
        estimates = {task: estimate(rows_of(data, key, task=task)) for task in data.tasks}
        estimates[paper.AVERAGE] = average(data, key)
        return {column: value for column, value in estimates.items() if value}
    scores, estimates = data.table("scores"), {}
    models = scores[scores["method"].isin(("base", "expert"))]
    for task, rows in models.groupby("task", sort=False):
        if best := highest(estimate(scored) for _, scored in rows.groupby(["method", "setting"])):
            estimates[str(task)] = best
    if estimates:
        mean = sum(value.mean for value in estimates.values()) / len(estimates)
        variance = sum(value.variance for value in estimates.values()) / len(estimates) ** 2
        estimates[paper.AVERAGE] = Estimate(mean, None, 0, known_variance=variance)
    return estimates


def rows_of(data: Evidence, key: Key, file: str = "scores", **others: Any) -> pd.DataFrame:
    """Return the result rows of one model.   others: further columns and their values."""
    return select(data.table(file), dict(zip(COLUMNS, key, strict=True)) | others)


def average(data: Evidence, key: Key, file: str = "scores", **others: Any) -> Estimate | None:
    """Return the mean over tasks and seeds of one model; None where it was not run."""
    if key == ("", "expert", "") and data.pool == "mergebench":
        return by_task(data, key).get(paper.AVERAGE)
    return estimate(rows_of(data, key, file, **others))


def gains(data: Evidence, upstream: str, setting: str) -> list[str]:
    """Return cells with FeatCal minus its merger and FeatCal minus the better adapter."""
    featcal = average(data, (upstream, "featcal", setting))
    merged = average(data, (upstream, "merged", ""))
    sizes = dict.fromkeys(("paper", setting))  # of adapters: published, and in proportion
    best = highest(average(data, (upstream, *model)) for model in product(ADAPTERS, sizes))
    return [margin(featcal, merged), margin(featcal, best)]


def with_changes(row: ModelRow, merger: ModelRow) -> ModelRow:
    """Add a row's changes against the merger it starts from, and return it."""
    for column in row.cells.keys() & merger.cells.keys():
        row.cells[column].change = row.cells[column].value - merger.cells[column].value
    return row


def with_best(block: list[ModelRow]) -> list[ModelRow]:
    """Mark the highest value of every column of a block, equal to one decimal, and return it."""
    cell_rows = [row.cells for row in block if row.cells]
    for column in {column for cells in cell_rows for column in cells} if len(cell_rows) > 1 else ():
        compared = [cells[column] for cells in cell_rows if column in cells]
        top = max(round(cell.value, 1) for cell in compared)
        for cell in compared:
            cell.best = round(cell.value, 1) == top
    return block


def gap_share(merged: float | None, calibrated: float | None, expert: float | None) -> float | None:
    """Return (calibrated − merged) / (expert − merged) in percent; None where undefined."""
    if merged is None or calibrated is None or expert is None or expert <= merged:
        return None
    return 100 * (calibrated - merged) / (expert - merged)


def recovered_share(data: Evidence, upstream: str, method: str, setting: str) -> float | None:
    """Return the measured share of the gap from a merger to the experts that a method recovers."""
    keys = ((upstream, "merged", ""), (upstream, method, setting), ("", "expert", ""))
    return gap_share(*((estimate := average(data, key)) and estimate.mean for key in keys))


def paper_recovered(
    number: str, upstream: str, corrected: bool = False, model: str = "", method: str = "featcal"
) -> float | None:
    """Return the same share from the paper's averages, as printed or corrected where possible."""
    read = paper.corrected_table if corrected else paper.paper_table
    keys = ((upstream, "merged"), (upstream, method), ("", "expert"))
    rows = (paper.paper_row(number, *key, model, read=read) for key in keys)
    return gap_share(*(row.get(paper.AVERAGE) for row in rows))


def cell_html(cell: Cell | None, whole: bool = True) -> str:
    """Return a cell as HTML, if whole with change and spread; the reason of a doubt by hovering."""
    if cell is None:
        return "<td>–</td>"
    value = f"<strong>{cell.value:.1f}</strong>" if cell.best else f"{cell.value:.1f}"
    if cell.doubt:
        value += f'<sup class="fc-doubt" title="{escape(cell.doubt)}">?</sup>'
    below = [arrow(cell.change)] if whole and cell.change is not None else []
    below += [f"sd&nbsp;{cell.spread:.1f}"] if whole and cell.spread is not None else []
    return f"<td>{value}{''.join(f'<small>{line}</small>' for line in below)}</td>"


def accuracy_table(
    rows: Sequence[ModelRow], titles: Mapping[str, str], caption: str, average: bool = True
) -> str:
    """Return an accuracy table as HTML.   average: add that column."""
    columns = titles | {paper.AVERAGE: "Average"} if average else titles
    is_full = {column: not average or column == paper.AVERAGE for column in columns}
    body = []
    for row in rows:
        label, colspan = escape(row.label), f'colspan="{len(columns)}"'
        cells = [cell_html(row.cells.get(column), full) for column, full in is_full.items()]
        if row.kind == "heading":
            body.append(("fc-merger", [label, f"<td {colspan}></td>"]))
        else:
            cells = cells if row.cells else [f'<td class="fc-none" {colspan}>not run</td>']
            body.append((f"fc-{row.kind}", [label, *cells]))
    kind = "fc-accuracy fc-averaged" if average else "fc-accuracy"
    return table(["Model", *map(escape, columns.values())], body, caption, kind)


def printed_table(rows: Sequence[ModelRow], titles: Mapping[str, str], caption: str) -> PageOutput:
    """Return a printed table of accuracies in a fold, with a link from cells in doubt."""
    average = any(paper.AVERAGE in row.cells for row in rows)
    html = accuracy_table(rows, titles, caption, average)
    doubts = any(cell.doubt for row in rows for cell in row.cells.values())
    return folded(html + note(f"?: {paper.DOUBTS}") * doubts)
