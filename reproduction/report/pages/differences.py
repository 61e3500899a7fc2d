"""Build the page of known differences and errata, and of the synthetic suite's tasks.

Facts next to an erratum are computed from the printed tables alone; the lists are errata.yaml, passages.yaml and
differences.yaml.
"""

import base64
import io
from html import escape
from itertools import product

import pandas as pd

from reproduction.report.evidence import read_json, results_folder, suite_record
from reproduction.report.html import PageOutput, note, table
from reproduction.report.page import place_link
from reproduction.report.paper import (
    AVERAGE,
    TASKS,
    Erratum,
    errata,
    packaged,
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
SHEET_BYTES = 150_000
SPLITS = ("train", "validation", "test")
LISTS = {"differences": "", "language": ", language models"}


def differences(suite: str) -> PageOutput:
    """List what differs from the paper: the real encoder, this suite, then the other suites."""
    suites, rows = packaged("differences.yaml"), []
    for name in ("real", suite, *(one for one in suites if one not in ("real", suite, "smoke"))):
        for kind, words in LISTS.items():
            entries = suites.get(name, {}).get(kind, [])
            if entries:
                rows.append(("fc-merger", [f"{escape(suites[name]['label'])}{words}", "", "", ""]))
                rows += [("", [escape(cell) for cell in entry]) for entry in entries]
    head = ["What", "In the paper", "Here", "Why"]
    return PageOutput(table(head, rows, "Known differences, by source", "fc-words"))


def cells(suite: str) -> PageOutput:
    """List every row of the paper with cells in doubt: as printed, what fits, and why."""
    rows = []
    for entry in sorted(errata(), key=lambda one: one.table):
        row = " · ".join(filter(None, (row_name(*entry.row), entry.model)))
        facts = f"<small>{escape('; '.join(evidence_of(entry)))}</small>"
        rows.append(
            (
                "",
                [
                    f"{place_link(entry.table)}<small>{escape(row)}</small>",
                    entry.kind,
                    _values(entry),
                    escape(entry.reason) + facts,
                ],
            )
        )
    head = ["Row", "Kind", "Cells: printed → what fits", "Why, and what the tables say"]
    return PageOutput(
        table(head, rows, "Cells of the paper’s tables that cannot be right", "fc-words")
    )


def contradicted(suite: str) -> PageOutput:
    """List the sentences and formulas of the paper that another place of it, or a fact, contradicts."""
    rows = [("", [escape(one.where), escape(one.says), escape(one.but)]) for one in passages()]
    head = ["Where", "What it says", "What contradicts it"]
    return PageOutput(table(head, rows, "Sentences and formulas that cannot be right", "fc-words"))


def _values(entry: Erratum) -> str:
    """Return the cells one per line: printed, and after an arrow what fits where it can be derived."""
    row, lines = printed_row(entry), []
    for cell in entry.cells:
        fits = f" → {_shown(entry.corrected[cell])}" if cell in entry.corrected else ""
        printed = " and ".join(
            _shown(float(value)) for value in row[row.index == cell]
        )  # two models
        lines.append(f'<span class="fc-whole">{escape(_title(cell))} {printed}{fits}</span>')
    return "<br>".join(lines)


def _shown(value: float) -> str:
    return f"{value:.1f}" if round(value, 1) == value else f"{value:g}"


def _title(cell: str) -> str:
    return "Average" if cell == AVERAGE else title_of(cell) or cell


def printed_row(entry: Erratum) -> pd.Series:
    """Return the printed row of an erratum, by task or column."""
    return _row(entry.table, *entry.row, entry.model)


def _row(name: str, upstream: str, method: str, model: str = "") -> pd.Series:
    frame = paper_table(name)
    if "samples_per_task" in frame:
        found = frame[frame["method"] == method]
        return pd.Series(found["mean"].values, index=found["samples_per_task"].astype(str))
    if "task" not in frame:  # a table of one study, whose columns are the cells
        return frame[frame["method"] == method].iloc[0].drop("method")
    return paper_row(name, upstream, method, model)


def evidence_of(entry: Erratum) -> list[str]:
    """Return what the printed tables themselves say of an erratum; nothing where only the reason speaks."""
    row = printed_row(entry)
    if entry.kind == "average":
        return [f"mean of the {len(row) - 1} cells: {row.drop(AVERAGE).mean():.2f}"]
    if entry.kind == "rotated":
        printed, shifted = scatter(entry)
        return [f"scatter {printed:.1f} as printed, {shifted:.1f} shifted back"]
    if entry.kind == "change":
        before = _row(entry.table, entry.row[0], "merged", entry.model)
        return [f"{row[c]:.1f} − {before[c]:.1f} = {row[c] - before[c]:.1f}" for c in entry.cells]
    if entry.kind == "unattainable":
        found = []
        for cell in entry.cells:
            right = int(row[cell] / 100 * ITEMS[cell])
            found += [
                f"{n} of {ITEMS[cell]} right: {100 * n / ITEMS[cell]:.2f}"
                for n in (right, right + 1)
            ]
        return found
    if entry.table not in ACCURACIES:
        return []
    return _nearest(entry) if entry.kind == "foreign" else _elsewhere(entry)


def scatter(entry: Erratum) -> tuple[float, float]:
    """Return how unlike the table's other rows the cells of a shifted row are: as printed, and shifted back.

    The deviation is of the differences to the columns' means, so the row's own level does not count.
    """
    frame = paper_table(entry.table, entry.model)
    same = [
        e for e in errata() if (e.kind, e.table, e.model) == ("rotated", entry.table, entry.model)
    ]
    moved = {tuple(one.row) for one in same}
    kept = [pair not in moved for pair in zip(frame["upstream"], frame["method"], strict=True)]
    profile, row = frame[kept].groupby("task")["value"].mean(), printed_row(entry)
    printed = pd.Series([row[cell] - profile[cell] for cell in entry.cells]).std()
    shifted = pd.Series([entry.corrected[cell] - profile[cell] for cell in entry.cells]).std()
    return float(printed), float(shifted)


def _nearest(entry: Erratum) -> list[str]:
    """Return the row of the same table that is nearest, task by task."""
    row, frame = printed_row(entry).drop(AVERAGE), paper_table(entry.table)
    pairs = set(zip(frame["upstream"], frame["method"], strict=True)) - {tuple(entry.row)}
    apart = {pair: (_row(entry.table, *pair).drop(AVERAGE) - row).abs() for pair in pairs}
    pair = min(apart, key=lambda one: (apart[one].mean(), apart[one].max()))
    return [
        f"nearest row: {row_name(*pair)}, {apart[pair].mean():.2f} apart on average, {apart[pair].max():.1f} at most"
    ]


def _elsewhere(entry: Erratum) -> list[str]:
    """Return the same cells where another table prints others for the same model, merger and method."""
    model, row, found = paper_table(entry.table)["model"].iloc[0], printed_row(entry), []
    others = [
        t for t in ACCURACIES if t != entry.table and paper_table(t)["model"].iloc[0] == model
    ]
    for cell, other in product((c for c in entry.cells if c != AVERAGE), others):
        there = _row(other, *entry.row).get(cell)
        if there is not None and there != row[cell]:
            found.append(f"{_title(cell)} {there:.1f} in Table {int(other[-2:])}")
    if entry.kind == "reference" and AVERAGE in entry.cells:
        fits = pd.Series(row.to_dict() | entry.corrected).drop(AVERAGE)
        found.append(
            f"mean {row.drop(AVERAGE).mean():.1f} as printed, {fits.mean():.1f} with what fits"
        )
    return found


def tasks(suite: str) -> PageOutput:
    """List the synthetic tasks: what each replaces, what one sees, classes and numbers of images."""
    rows = []
    for task in suite_record(suite).get("tasks", []):
        name = task.get("paper_name") or TASKS.get(task["task"], task["task"])
        counts = (task.get(split) for split in SPLITS)
        sizes = " / ".join("–" if count is None else str(count) for count in counts)
        rows.append(
            (
                "",
                [
                    escape(name),
                    escape(task.get("description", "")),
                    str(len(task.get("classes", []))),
                    sizes,
                ],
            )
        )
    for task, facts in read_json(results_folder(suite) / "language.json").get("tasks", {}).items():
        sizes = " / ".join(str(facts.get("rows", {}).get(split, "–")) for split in SPLITS)
        about = facts.get("description") or f"{facts.get('location', '')} ({facts.get('kind', '')})"
        rows.append(
            (
                "",
                [
                    escape(title_of(task) or f"{task.capitalize()} expert"),
                    escape(about),
                    "–",
                    sizes,
                ],
            )
        )
    if not rows:
        return PageOutput(note("○ not run: no suite.json."))
    head = ["In the role of", "What one sees", "Classes", "Train / validation / test"]
    return PageOutput(table(head, rows, "Tasks of the suite", "fc-words"))


def contact_sheet(suite: str) -> PageOutput:
    """Show one row of pictures per task in the order of the list, as a JPEG small enough for the page."""
    from PIL import Image

    path = results_folder(suite) / "contact_sheet.png"
    if not path.is_file():
        return PageOutput(note("○ not run: no contact sheet."))
    picture = Image.open(path).convert("RGB")
    for shrink, quality in product((1.0, 0.8, 0.65, 0.5, 0.35, 0.25), (88, 75, 60)):
        out, size = io.BytesIO(), (int(picture.width * shrink), int(picture.height * shrink))
        picture.resize(size, Image.Resampling.LANCZOS).save(out, "JPEG", quality=quality)
        if out.tell() <= SHEET_BYTES:
            break
    encoded = base64.b64encode(out.getvalue()).decode()
    return PageOutput(picture={"image/jpeg": encoded}, text="contact sheet")
