"""Build the page of known differences, errata and tasks, and of adapters on their own samples.

The lists are errata.yaml, passages.yaml and differences.yaml. Adapters see unlabelled test images, as in their
own sources; FeatCal sees training images.
"""

import base64
import io
import math
from collections.abc import Mapping
from html import escape
from itertools import groupby, product, starmap
from operator import itemgetter
from statistics import fmean, variance

import pandas as pd

from reproduction.report import paper
from reproduction.report.claims import studied_setting
from reproduction.report.evidence import Evidence, read_json, results_folder, select
from reproduction.report.html import PageOutput, change, estimate_cell, note, tabulate
from reproduction.report.page import location_link
from reproduction.report.statistics import Estimate, bits, estimate, lead
from reproduction.report.tables import ADAPTERS, NAMES, UPSTREAMS, average, row_name, rows_of
from reproduction.results import packed

SHEET = 624  # pixels across


def differences(suite: str) -> PageOutput:
    """List the known differences from the paper: of MiniLM, then of this suite."""
    suites, rows = paper.packaged("differences.yaml"), []
    kinds = {"differences": "", "language": ", language models"}
    for name, (kind, language) in product(("real", suite), kinds.items()):
        entries = suites[name].get(kind, [])
        if entries:
            rows.append(("fc-merger", [f"{escape(suites[name]['label'])}{language}", "", "", ""]))
        rows += [[*map(escape, entry)] for entry in entries]
    head = ["What", "In the paper", "Here", "Why"]
    return tabulate(head, rows, "Known differences, by source", "fc-words")


def cells(suite: str) -> PageOutput:
    """List every row of the paper with cells in doubt: printed, corrected, and the reason."""
    rows = []
    for erratum in sorted(paper.errata(), key=lambda erratum: erratum.table):
        name = " · ".join(filter(None, (row_name(*erratum.row), erratum.model)))
        row = f"{location_link(erratum.table)}<small>{escape(name)}</small>"
        why = f"{escape(erratum.reason)}<small>{escape(erratum.facts)}</small>"
        rows.append([row, erratum.kind, _cell_lines(erratum), why])
    head = ["Row", "Kind", "Cells: printed → corrected", "Why, and what the tables say"]
    return tabulate(head, rows, "Cells of the paper’s tables that cannot be right", "fc-words")


def contradicted(suite: str) -> PageOutput:
    """List sentences and formulas of the paper that contradict another passage or a fact."""
    entries = paper.packaged("passages.yaml")
    rows = [[escape(passage[key]) for key in ("where", "says", "but")] for passage in entries]
    head = ["Where", "What it says", "What contradicts it"]
    return tabulate(head, rows, "Sentences and formulas that cannot be right", "fc-words")


def _cell_lines(entry: paper.Erratum) -> str:
    """Return the cells one per line: the printed value, and the corrected one if known."""
    row, lines = printed_row(entry), []
    for cell in entry.cells:
        fits = f" → {_as_text(entry.corrected[cell])}" if cell in entry.corrected else ""
        printed = " and ".join(_as_text(float(v)) for v in row[row.index == cell])  # of two models
        title = "Average" if cell == paper.AVERAGE else paper.title_of(cell) or cell
        lines.append(f'<span class="fc-whole">{escape(title)} {printed}{fits}</span>')
    return "<br>".join(lines)


def _as_text(value: float) -> str:
    return f"{value:.1f}" if round(value, 1) == value else f"{value:g}"


def printed_row(entry: paper.Erratum) -> pd.Series:
    """Return the printed row of an erratum, by task or column."""
    frame, (upstream, method) = paper.paper_table(entry.table), entry.row
    if "samples_per_task" in frame:
        rows = frame[frame["method"] == method]
        return pd.Series(rows["mean"].values, index=rows["samples_per_task"].astype(str))
    if "task" not in frame:  # a table of one study, whose columns are the cells
        return frame[frame["method"] == method].iloc[0].drop("method")
    return paper.paper_row(entry.table, upstream, method, entry.model)


def tasks(suite: str) -> PageOutput:
    """List the synthetic tasks by split sizes, with replaced task, content and classes."""
    entries, rows = [], []
    for task in read_json(results_folder(suite) / "suite.json").get("tasks", []):
        name = task.get("paper_name") or paper.TASKS.get(task["task"], task["task"])
        cells = [escape(name), escape(task.get("description", ""))]
        entries.append((_sizes(task), [*cells, str(len(task.get("classes", [])))]))
    for task, facts in read_json(results_folder(suite) / "language.json").get("tasks", {}).items():
        name = paper.title_of(task) or f"{task.capitalize()} expert"
        about = facts.get("description") or f"{facts.get('location', '')} ({facts.get('kind', '')})"
        entries.append((_sizes(facts.get("rows", {})), [escape(name), escape(about), ""]))
    for sizes, same_sizes in groupby(entries, key=itemgetter(0)):
        rows.append(("fc-merger", [f"train / validation / test: {sizes}", "", ""]))
        rows += [row for _, row in same_sizes]
    head = ["In the role of", "What one sees", "Classes"]
    return tabulate(head, rows, "Tasks of the suite", "fc-words", "no suite.json")


def _sizes(counts: Mapping[str, int | None]) -> str:
    sizes = (counts.get(split) for split in ("train", "validation", "test"))
    return " / ".join("–" if count is None else str(count) for count in sizes)


def contact_sheet(suite: str) -> PageOutput:
    """Show one row of pictures per task in the order of the list, as a small JPEG."""
    from PIL import Image

    path = results_folder(suite) / "contact_sheet.png"
    if not path.is_file():
        return PageOutput(note("○ not run: no contact sheet."))
    picture, out = Image.open(path).convert("RGB"), io.BytesIO()
    size = (SHEET, picture.height * SHEET // picture.width)
    picture.resize(size, Image.Resampling.LANCZOS).save(out, "JPEG", quality=60)
    encoded = base64.b64encode(out.getvalue()).decode()
    return PageOutput(picture={"image/jpeg": encoded}, text="contact sheet")


def adapters_on_samples(suite: str) -> PageOutput:
    """Show each adapter on images it saw, on others, and trained on FeatCal's samples instead."""
    rows = []
    models = product(paper.SIZES.items(), UPSTREAMS.items(), ADAPTERS)
    for (role, size), (merger, name), adapter in models:
        cells = _adapter_cells(Evidence(suite, role, "8"), merger, adapter)
        if set(cells) != {"–"}:
            rows.append([f"{NAMES[adapter]}<small>{name}, {size}</small>", *cells])
    head = ["", "On images it saw", "On others", "FeatCal minus it, others"]
    head += ["Worth of being shown", "On FeatCal’s samples"]
    caption = "Average accuracy (%) of adapters trained on scored inputs; ± two standard errors, paired by input"
    return tabulate(head, rows, caption, "fc-long", "no record of the images that adapters saw")


def _adapter_cells(data: Evidence, merger: str, adapter: str) -> list[str]:
    """Return the cells of one adapter; MiniLM, whose adapters see no scored text, has its own runs."""
    main = studied_setting(data.suite)
    trained = estimate_cell(average(data, (merger, adapter, f"{main}_train")))
    if data.role == paper.REAL:
        keys = ((adapter, f"{main}_scored"), (adapter, main), ("featcal", main))
        scored, unscored, featcal = (average(data, (merger, *key)) for key in keys)
        pairs = ((featcal, unscored), (scored, unscored))
        return [estimate_cell(scored), estimate_cell(unscored), *starmap(change, pairs), trained]
    run = data.settings().get("adapt", {}).get(f"{data.role}-{data.pool}-{merger}-{adapter}", {})
    draw = (run.get("settings") or {}).get(main, {}).get("draw")
    seen = select(data.table("seen"), {"stream": "test_unlabelled" if draw else None})
    count = (draw or {}).get("samples")  # None: all test images
    seen = seen[seen["samples"].isna() if count is None else seen["samples"] == count]
    rows = [rows_of(data, (merger, method, main)) for method in (adapter, "featcal")]
    accuracies, leads = [], []
    for was_shown in (True, False):
        by_adapter, by_featcal = (averages_on(scores, seen, was_shown) for scores in rows)
        means = [average.mean for average in by_adapter.values()]
        accuracies.append(f"{fmean(means):.1f}" if means else "–")
        seeds = [seed for seed in by_adapter if seed in by_featcal]
        leads.append({seed: lead(by_featcal[seed], by_adapter[seed]) for seed in seeds})
    shown, others = leads
    both = [(shown[seed], others[seed]) for seed in shown if seed in others]
    worth = [(b - a, math.hypot(a_room, b_room)) for (a, a_room), (b, b_room) in both]
    return [*accuracies, mean_lead([*others.values()]), mean_lead(worth), trained]


def averages_on(rows: pd.DataFrame, seen: pd.DataFrame, was_shown: bool) -> dict[str, Estimate]:
    """Return by seed a model's average on the images its adapter saw, or on the other images."""
    flags = {(row.seed, row.task): bits(row.seen, int(row.count)) for row in seen.itertuples()}
    scored: dict[str, list[dict[str, object]]] = {}
    for row in rows[["seed", "task", "metric", "count", "correct"]].to_dict("records"):
        flag = flags.get((row["seed"], row["task"]))
        if flag is not None:
            right = bits(row["correct"], int(row["count"]))[flag == was_shown]
            value = 100 * right.mean() if len(right) > 1 else math.nan
            part = {"value": value, "count": len(right), "correct": packed(right)}
            scored.setdefault(row["seed"], []).append(row | part)
    frames = {seed: pd.DataFrame(seed_rows) for seed, seed_rows in scored.items()}
    return {seed: estimate(frame) for seed, frame in frames.items() if frame["count"].min() > 1}


def mean_lead(margins: list[tuple[float, float]]) -> str:
    """Return the mean over seeds ± two standard errors: of the images, and s²/S of S ≥ 2 seeds."""
    if not margins:
        return "–"
    leads, rooms = zip(*margins, strict=True)
    spread = variance(leads) / len(leads) if len(leads) > 1 else 0.0
    room = math.sqrt(fmean(room**2 for room in rooms) + 4 * spread)
    return f"{fmean(leads):+z.1f} ± {room:.1f}"
