"""Build the page of known differences, errata and tasks, and of adapters on samples they trained on.

Facts next to an erratum are computed from the printed tables alone; the lists are errata.yaml, passages.yaml and
differences.yaml. Adapters see unlabelled test images, as in their own sources; FeatCal sees training images.
Flags are one bit per test image, from hexadecimal text in the result files.
"""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import product
from statistics import fmean, variance

import pandas as pd

from reproduction.report.claims import studied_setting
from reproduction.report.evidence import Evidence, read_json, results_folder, select, suite_record
from reproduction.report.html import PageOutput, estimated, listed, margin, note
from reproduction.report.page import place_link
from reproduction.report.paper import (
    AVERAGE,
    REAL,
    SIZES,
    TASKS,
    Erratum,
    errata,
    packaged,
    paper_row,
    paper_table,
    title_of,
)
from reproduction.report.statistics import Bits, bits, mean_variance
from reproduction.report.tables import NAMES, UPSTREAMS, average, row_name

# tables with several rows, task by task
ACCURACIES = "table01 table07 table08 table09 table10 table11 table03".split()
ITEMS = {"mrpc": 408}  # test items, of tasks with a score that no count of right answers gives
SHEET_BYTES = 150_000
LISTS = {"differences": "", "language": ", language models"}
STREAM = "test_unlabelled"
ADAPTERS = ("surgery", "prob_surgery")
Flags = Mapping[str, Bits]  # by task, one per test image
Draws = Mapping[str, Flags]  # by seed
Margin = tuple[float, float]  # points, and their variance or two standard errors


def differences(suite: str) -> PageOutput:
    """List what differs from the paper: the real encoder, this suite, then the other suites."""
    suites, rows = packaged("differences.yaml"), []
    names = dict.fromkeys(["real", suite, *(name for name in suites if name != "smoke")])
    for name, (kind, words) in product(names, LISTS.items()):
        entries = suites.get(name, {}).get(kind, [])
        if entries:
            rows.append(("fc-merger", [f"{escape(suites[name]['label'])}{words}", "", "", ""]))
            rows += [[escape(cell) for cell in entry] for entry in entries]
    head = ["What", "In the paper", "Here", "Why"]
    return listed(head, rows, "Known differences, by source", "fc-words")


def cells(suite: str) -> PageOutput:
    """List every row of the paper with cells in doubt: as printed, what fits, and why."""
    rows = []
    for entry in sorted(errata(), key=lambda one: one.table):
        name = " · ".join(filter(None, (row_name(*entry.row), entry.model)))
        facts = f"<small>{escape('; '.join(evidence_of(entry)))}</small>"
        place = f"{place_link(entry.table)}<small>{escape(name)}</small>"
        rows.append([place, entry.kind, _values(entry), escape(entry.reason) + facts])
    head = ["Row", "Kind", "Cells: printed → what fits", "Why, and what the tables say"]
    return listed(head, rows, "Cells of the paper’s tables that cannot be right", "fc-words")


def contradicted(suite: str) -> PageOutput:
    """List the sentences and formulas of the paper that another place of it, or a fact, contradicts."""
    entries = packaged("passages.yaml")
    rows = [[escape(one[word]) for word in ("where", "says", "but")] for one in entries]
    head = ["Where", "What it says", "What contradicts it"]
    return listed(head, rows, "Sentences and formulas that cannot be right", "fc-words")


def _values(entry: Erratum) -> str:
    """Return the cells one per line: printed, and after an arrow what fits where it can be derived."""
    row, lines = printed_row(entry), []
    for cell in entry.cells:
        fits = f" → {_shown(entry.corrected[cell])}" if cell in entry.corrected else ""
        printed = " and ".join(_shown(float(v)) for v in row[row.index == cell])  # of two models
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
        rights = ((c, int(row[c] / 100 * ITEMS[c]) + more) for c in entry.cells for more in (0, 1))
        return [f"{n} of {ITEMS[c]} right: {100 * n / ITEMS[c]:.2f}" for c, n in rights]
    if entry.table not in ACCURACIES:
        return []
    return _nearest(entry) if entry.kind == "foreign" else _elsewhere(entry)


def scatter(entry: Erratum) -> tuple[float, float]:
    """Return how unlike the table's other rows the cells of a shifted row are: as printed, and shifted back.

    The deviation is of the differences to the columns' means, so the row's own level does not count.
    """
    frame, about = paper_table(entry.table, entry.model), ("rotated", entry.table, entry.model)
    moved = {tuple(one.row) for one in errata() if (one.kind, one.table, one.model) == about}
    kept = [pair not in moved for pair in zip(frame["upstream"], frame["method"], strict=True)]
    profile, row = frame[kept].groupby("task")["value"].mean(), printed_row(entry)
    printed, shifted = (
        pd.Series([values[cell] - profile[cell] for cell in entry.cells]).std()
        for values in (row, entry.corrected)
    )
    return float(printed), float(shifted)


def _nearest(entry: Erratum) -> list[str]:
    """Return the row of the same table that is nearest, task by task."""
    row, frame = printed_row(entry).drop(AVERAGE), paper_table(entry.table)
    pairs = set(zip(frame["upstream"], frame["method"], strict=True)) - {tuple(entry.row)}
    apart = {pair: (_row(entry.table, *pair).drop(AVERAGE) - row).abs() for pair in pairs}
    pair = min(apart, key=lambda one: (apart[one].mean(), apart[one].max()))
    far = f"{apart[pair].mean():.2f} apart on average, {apart[pair].max():.1f} at most"
    return [f"nearest row: {row_name(*pair)}, {far}"]


def _elsewhere(entry: Erratum) -> list[str]:
    """Return the same cells where another table prints others for the same model, merger and method."""
    row, found = printed_row(entry), []
    models = {table: paper_table(table)["model"].iloc[0] for table in ACCURACIES}
    others = [t for t in models if t != entry.table and models[t] == models[entry.table]]
    for cell, other in product((c for c in entry.cells if c != AVERAGE), others):
        there = _row(other, *entry.row).get(cell)
        if there is not None and there != row[cell]:
            found.append(f"{_title(cell)} {there:.1f} in Table {int(other[-2:])}")
    if entry.kind == "reference" and AVERAGE in entry.cells:
        printed = row.drop(AVERAGE).mean()
        fits = pd.Series(row.to_dict() | entry.corrected).drop(AVERAGE).mean()
        found.append(f"mean {printed:.1f} as printed, {fits:.1f} with what fits")
    return found


def tasks(suite: str) -> PageOutput:
    """List the synthetic tasks: what each replaces, what one sees, classes and numbers of images."""
    rows = []
    for task in suite_record(suite).get("tasks", []):
        name = task.get("paper_name") or TASKS.get(task["task"], task["task"])
        about = [escape(name), escape(task.get("description", ""))]
        rows.append([*about, str(len(task.get("classes", []))), _sizes(task)])
    for task, facts in read_json(results_folder(suite) / "language.json").get("tasks", {}).items():
        name = title_of(task) or f"{task.capitalize()} expert"
        about = facts.get("description") or f"{facts.get('location', '')} ({facts.get('kind', '')})"
        rows.append([escape(name), escape(about), "–", _sizes(facts.get("rows", {}))])
    head = ["In the role of", "What one sees", "Classes", "Train / validation / test"]
    return listed(head, rows, "Tasks of the suite", "fc-words", "no suite.json")


def _sizes(counts: Mapping[str, int | None]) -> str:
    known = (counts.get(split) for split in ("train", "validation", "test"))
    return " / ".join("–" if count is None else str(count) for count in known)


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


def adapters_on_samples(suite: str) -> PageOutput:
    """Show each adapter on images it saw, on others, and trained on FeatCal's samples instead."""
    rows = []
    places = product(SIZES.items(), UPSTREAMS.items(), ADAPTERS)
    for (role, size), (merger, name), adapter in places:
        cells = _adapter_cells(Evidence(suite, role, "8"), merger, adapter)
        if set(cells) != {"–"}:
            rows.append([f"{NAMES[adapter]}<small>{name}, {size}</small>", *cells])
    head = ["", "On images it saw", "On others", "FeatCal minus it, others"]
    head += ["Worth of being shown", "On FeatCal’s samples"]
    caption = "Average accuracy (%) of adapters trained on scored inputs; ± two standard errors, paired by input"
    return listed(head, rows, caption, "fc-long", "no record of the images that adapters saw")


def _adapter_cells(ours: Evidence, merger: str, adapter: str) -> list[str]:
    """Return the cells of one adapter; of the real encoder, whose adapters see no scored text, from its own runs."""
    main = studied_setting(ours.suite)
    trained = estimated(average(ours, (merger, adapter, f"{main}_train")))
    if ours.role == REAL:
        keys = ((adapter, f"{main}_scored"), (adapter, main), ("featcal", main))
        scored, apart, featcal = (average(ours, (merger, *key)) for key in keys)
        pairs = (
            margin(*pair) if all(pair) else "–" for pair in ((featcal, apart), (scored, apart))
        )
        return [estimated(scored), estimated(apart), *pairs, trained]
    right = select(ours.table("scores.correct"), {"upstream": merger})
    run = ours.settings().get("adapt", {}).get(f"{ours.role}-{ours.pool}-{merger}-{adapter}", {})
    draw = (run.get("settings") or {}).get(main, {}).get("draw")
    seen = select(ours.table("seen"), {"stream": STREAM}) if draw else ours.table("seen")[:0]
    number = (draw or {}).get("samples")  # None: all test images
    own = seen[seen["samples"].isna() if number is None else seen["samples"] == number]
    counts = {task: int(n) for task, n in zip(own["task"], own["count"], strict=True)}
    answers = {}
    for method in (adapter, "featcal"):
        mine = select(right, {"method": method, "setting": main})
        answers[method] = flags_of(mine, "correct", counts)
    means, on, off = compared(answers["featcal"], answers[adapter], flags_of(own, "seen", counts))
    worth = mean_margin([(off[s][0] - on[s][0], on[s][1] + off[s][1]) for s in on if s in off])
    accuracies = (f"{mean:.1f}" if mean is not None else "–" for mean in means)
    return [*accuracies, _said(mean_margin(list(off.values()))), _said(worth), trained]


def flags_of(rows: pd.DataFrame, column: str, counts: Mapping[str, int]) -> Draws:
    """Return the flags of every task that has a count, by seed, from their text in a column."""
    found: dict[str, dict[str, Bits]] = {}
    for seed, task, text in zip(rows["seed"], rows["task"], rows[column], strict=True):
        if task in counts:
            found.setdefault(seed, {})[task] = bits(text, counts[task])
    return dict(found)


def compared(
    featcal: Draws, adapter: Draws, shown: Draws
) -> tuple[list[float | None], dict[str, Margin], dict[str, Margin]]:
    """Return the adapter's accuracy on shown and on other images, and by seed FeatCal minus it on both."""
    means: list[float | None] = []
    gaps: list[dict[str, Margin]] = []
    for parts in (shown, {seed: others(flags) for seed, flags in shown.items()}):
        shares = (share(adapter[seed], where) for seed, where in parts.items() if seed in adapter)
        known = [one for one in shares if one is not None]
        means.append(fmean(known) if known else None)
        both = {seed: where for seed, where in parts.items() if seed in adapter and seed in featcal}
        found = {seed: paired(featcal[seed], adapter[seed], where) for seed, where in both.items()}
        gaps.append({seed: gap for seed, gap in found.items() if gap})
    return means, *gaps


def others(shown: Flags) -> Flags:
    """Return the test images that were not shown."""
    return {task: ~flags for task, flags in shown.items()}


def share(right: Flags, where: Flags) -> float | None:
    """Return the percentage right among some images, mean over tasks; None where a task has none of them."""
    if not all(where[task].any() for task in right):
        return None
    return 100 * fmean(float(flags[where[task]].mean()) for task, flags in right.items())


def paired(left: Flags, right: Flags, where: Flags) -> Margin | None:
    """Return the mean over tasks of the difference of two accuracies in percent, and its variance.

    With dᵢ ∈ {−1, 0, 1} the difference of both answers to image i, a task's mean has the variance s²(d)/n over
    its n images. None where a task has fewer than two of them.
    """
    each = [100 * (left[task].astype(float) - right[task])[where[task]] for task in left]
    known = [found for d in each if (found := mean_variance(d)) is not None]
    if len(known) < len(each) or not each:
        return None
    return fmean(float(d.mean()) for d in each), math.fsum(known) / len(each) ** 2


def mean_margin(found: Sequence[Margin]) -> Margin | None:
    """Return the mean over seeds with two standard errors: of the images, and s²/S of S ≥ 2 seeds."""
    if not found:
        return None
    means, variances = zip(*found, strict=True)
    spread = variance(means) / len(means) if len(means) > 1 else 0.0
    return fmean(means), 2 * math.sqrt(fmean(variances) + spread)


def _said(found: Margin | None) -> str:
    return "–" if found is None else f"{round(found[0], 1) + 0.0:+.1f} ± {found[1]:.1f}"
