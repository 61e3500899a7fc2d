"""Build the page of known differences, errata and tasks, and of adapters on samples they trained on.

The lists are errata.yaml, passages.yaml and differences.yaml. Adapters see unlabelled test images, as in their
own sources; FeatCal sees training images.
"""

import base64
import io
import math
from collections.abc import Mapping
from html import escape
from itertools import groupby, product
from operator import itemgetter
from statistics import fmean, variance

import pandas as pd

from reproduction.report import paper
from reproduction.report.claims import studied_setting
from reproduction.report.evidence import Evidence, read_json, results_folder, select, suite_record
from reproduction.report.html import PageOutput, estimated, listed, margin, note
from reproduction.report.page import place_link
from reproduction.report.statistics import Estimate, bits, estimate, lead
from reproduction.report.tables import ADAPTERS, NAMES, UPSTREAMS, average, row_name
from reproduction.results import packed

SHEET = 624  # pixels across


def differences(suite: str) -> PageOutput:
    """List what differs from the paper: of MiniLM, then of this suite."""
    suites, rows = paper.packaged("differences.yaml"), []
    kinds = {"differences": "", "language": ", language models"}
    for name, (kind, words) in product(("real", suite), kinds.items()):
        entries = suites[name].get(kind, [])
        if entries:
            rows.append(("fc-merger", [f"{escape(suites[name]['label'])}{words}", "", "", ""]))
        rows += [[*map(escape, entry)] for entry in entries]
    head = ["What", "In the paper", "Here", "Why"]
    return listed(head, rows, "Known differences, by source", "fc-words")


def cells(suite: str) -> PageOutput:
    """List every row of the paper with cells in doubt: as printed, what fits, and why."""
    rows = []
    for entry in sorted(paper.errata(), key=lambda one: one.table):
        name = " · ".join(filter(None, (row_name(*entry.row), entry.model)))
        place = f"{place_link(entry.table)}<small>{escape(name)}</small>"
        why = f"{escape(entry.reason)}<small>{escape(entry.facts)}</small>"
        rows.append([place, entry.kind, _values(entry), why])
    head = ["Row", "Kind", "Cells: printed → corrected", "Why, and what the tables say"]
    return listed(head, rows, "Cells of the paper’s tables that cannot be right", "fc-words")


def contradicted(suite: str) -> PageOutput:
    """List the sentences and formulas of the paper that another place of it, or a fact, contradicts."""
    entries = paper.packaged("passages.yaml")
    rows = [[escape(one[word]) for word in ("where", "says", "but")] for one in entries]
    head = ["Where", "What it says", "What contradicts it"]
    return listed(head, rows, "Sentences and formulas that cannot be right", "fc-words")


def _values(entry: paper.Erratum) -> str:
    """Return the cells one per line: printed, and after an arrow what fits where it can be derived."""
    row, lines = printed_row(entry), []
    for cell in entry.cells:
        fits = f" → {_shown(entry.corrected[cell])}" if cell in entry.corrected else ""
        printed = " and ".join(_shown(float(v)) for v in row[row.index == cell])  # of two models
        title = "Average" if cell == paper.AVERAGE else paper.title_of(cell) or cell
        lines.append(f'<span class="fc-whole">{escape(title)} {printed}{fits}</span>')
    return "<br>".join(lines)


def _shown(value: float) -> str:
    return f"{value:.1f}" if round(value, 1) == value else f"{value:g}"


def printed_row(entry: paper.Erratum) -> pd.Series:
    """Return the printed row of an erratum, by task or column."""
    frame, (upstream, method) = paper.paper_table(entry.table), entry.row
    if "samples_per_task" in frame:
        found = frame[frame["method"] == method]
        return pd.Series(found["mean"].values, index=found["samples_per_task"].astype(str))
    if "task" not in frame:  # a table of one study, whose columns are the cells
        return frame[frame["method"] == method].iloc[0].drop("method")
    return paper.paper_row(entry.table, upstream, method, entry.model)


def tasks(suite: str) -> PageOutput:
    """List the synthetic tasks by their numbers of rows: what each replaces, what one sees, classes."""
    found, rows = [], []
    for task in suite_record(suite).get("tasks", []):
        name = task.get("paper_name") or paper.TASKS.get(task["task"], task["task"])
        about = [escape(name), escape(task.get("description", ""))]
        found.append((_sizes(task), [*about, str(len(task.get("classes", [])))]))
    for task, facts in read_json(results_folder(suite) / "language.json").get("tasks", {}).items():
        name = paper.title_of(task) or f"{task.capitalize()} expert"
        about = facts.get("description") or f"{facts.get('location', '')} ({facts.get('kind', '')})"
        found.append((_sizes(facts.get("rows", {})), [escape(name), escape(about), ""]))
    for sizes, own in groupby(found, key=itemgetter(0)):
        rows.append(("fc-merger", [f"train / validation / test: {sizes}", "", ""]))
        rows += [row for _, row in own]
    head = ["In the role of", "What one sees", "Classes"]
    return listed(head, rows, "Tasks of the suite", "fc-words", "no suite.json")


def _sizes(counts: Mapping[str, int | None]) -> str:
    known = (counts.get(split) for split in ("train", "validation", "test"))
    return " / ".join("–" if count is None else str(count) for count in known)


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
    places = product(paper.SIZES.items(), UPSTREAMS.items(), ADAPTERS)
    for (role, size), (merger, name), adapter in places:
        cells = _adapter_cells(Evidence(suite, role, "8"), merger, adapter)
        if set(cells) != {"–"}:
            rows.append([f"{NAMES[adapter]}<small>{name}, {size}</small>", *cells])
    head = ["", "On images it saw", "On others", "FeatCal minus it, others"]
    head += ["Worth of being shown", "On FeatCal’s samples"]
    caption = "Average accuracy (%) of adapters trained on scored inputs; ± two standard errors, paired by input"
    return listed(head, rows, caption, "fc-long", "no record of the images that adapters saw")


def _adapter_cells(ours: Evidence, merger: str, adapter: str) -> list[str]:
    """Return the cells of one adapter; of MiniLM, whose adapters see no scored text, from its own runs."""
    main = studied_setting(ours.suite)
    trained = estimated(average(ours, (merger, adapter, f"{main}_train")))
    if ours.role == paper.REAL:
        keys = ((adapter, f"{main}_scored"), (adapter, main), ("featcal", main))
        scored, apart, featcal = (average(ours, (merger, *key)) for key in keys)
        pairs = ((featcal, apart), (scored, apart))
        margins = (margin(*pair) if all(pair) else "–" for pair in pairs)
        return [estimated(scored), estimated(apart), *margins, trained]
    run = ours.settings().get("adapt", {}).get(f"{ours.role}-{ours.pool}-{merger}-{adapter}", {})
    draw = (run.get("settings") or {}).get(main, {}).get("draw")
    seen = select(ours.table("seen"), {"stream": "test_unlabelled" if draw else None})
    number = (draw or {}).get("samples")  # None: all test images
    seen = seen[seen["samples"].isna() if number is None else seen["samples"] == number]
    keys = {method: {"upstream": merger, "method": method} for method in (adapter, "featcal")}
    rows = {m: select(ours.table("scores"), key | {"setting": main}) for m, key in keys.items()}
    accuracies, gaps = [], []
    for shown in (True, False):
        theirs, mine = (among(rows[method], seen, shown) for method in (adapter, "featcal"))
        means = [one.mean for one in theirs.values()]
        accuracies.append(f"{fmean(means):.1f}" if means else "–")
        gaps.append({s: lead(mine[s], one) for s, one in theirs.items() if s in mine})
    on, off = gaps
    worth = [(off[s][0] - on[s][0], math.hypot(on[s][1], off[s][1])) for s in on if s in off]
    return [*accuracies, mean_lead([*off.values()]), mean_lead(worth), trained]


def among(rows: pd.DataFrame, seen: pd.DataFrame, shown: bool) -> dict[str, Estimate]:
    """Return by seed a model's average on the images its adapter was shown, or others; two at least."""
    flags = {(one.seed, one.task): bits(one.seen, int(one.count)) for one in seen.itertuples()}
    found: dict[str, list[dict[str, object]]] = {}
    for row in rows[["seed", "task", "metric", "count", "correct"]].to_dict("records"):
        where = flags.get((row["seed"], row["task"]))
        if where is not None:
            right = bits(row["correct"], int(row["count"]))[where == shown]
            value = 100 * right.mean() if len(right) > 1 else math.nan
            part = {"value": value, "count": len(right), "correct": packed(right)}
            found.setdefault(row["seed"], []).append(row | part)
    whole = {seed: own for seed, own in found.items() if min(one["count"] for one in own) > 1}
    return {seed: estimate(pd.DataFrame(own)) for seed, own in whole.items()}


def mean_lead(found: list[tuple[float, float]]) -> str:
    """Return the mean over seeds ± two standard errors: of the images, and s²/S of S ≥ 2 seeds."""
    if not found:
        return "–"
    leads, rooms = zip(*found, strict=True)
    spread = variance(leads) / len(leads) if len(leads) > 1 else 0.0
    room = math.sqrt(fmean(room**2 for room in rooms) + 4 * spread)
    return f"{round(fmean(leads), 1) + 0.0:+.1f} ± {room:.1f}"
