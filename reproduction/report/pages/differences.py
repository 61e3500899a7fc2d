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
from reproduction.report.html import PageOutput, estimated, note, standing, table
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
    passages,
    title_of,
)
from reproduction.report.statistics import Bits, bits, mean_variance
from reproduction.report.tables import NAMES, UPSTREAMS, average, row_name

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
STREAM = "test_unlabelled"
ADAPTERS = ("surgery", "prob_surgery")
Flags = Mapping[str, Bits]  # by task, one per test image
Draws = Mapping[str, Flags]  # by seed
Margin = tuple[float, float]  # points, and their variance or two standard errors


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


def adapters_on_samples(suite: str) -> PageOutput:
    """Show each adapter on images it saw, on others, and trained on FeatCal's samples instead."""
    found = []
    for role, size in SIZES.items():
        ours = Evidence(suite, role, "8")
        for merger, name in UPSTREAMS.items():
            for adapter in ADAPTERS:
                cells = _adapter_cells(ours, merger, adapter)
                if set(cells) != {"–"}:
                    found.append(("", [f"{NAMES[adapter]}<small>{name}, {size}</small>", *cells]))
    if not found:
        return PageOutput(note("○ not run: no record of the images that adapters saw."))
    head = [
        "",
        "On images it saw",
        "On others",
        "FeatCal minus it, others",
        "Worth of being shown",
        "On FeatCal’s samples",
    ]
    caption = "Average accuracy (%) of adapters trained on scored inputs; ± two standard errors, paired by input"
    return PageOutput(table(head, found, caption, "fc-long"))


def _adapter_cells(ours: Evidence, merger: str, adapter: str) -> list[str]:
    """Return the cells of one adapter; of the real encoder, whose adapters see no scored text, from its own runs."""
    main = studied_setting(ours.suite)
    trained = estimated(average(ours, (merger, adapter, f"{main}_train")))
    if ours.role == REAL:
        scored, apart = (
            average(ours, (merger, adapter, main + stream)) for stream in ("_scored", "")
        )
        featcal = average(ours, (merger, "featcal", main))
        pairs = (
            standing(one, other) if one and other else "–"
            for one, other in ((featcal, apart), (scored, apart))
        )
        return [estimated(scored), estimated(apart), *pairs, trained]
    seen, right = ours.table("seen"), select(ours.table("scores.correct"), {"upstream": merger})
    settings = (
        ours.settings().get("adapt", {}).get(f"{ours.role}-{ours.pool}-{merger}-{adapter}", {})
    )
    draw = (settings.get("settings") or {}).get(main, {}).get("draw") or {}
    own = select(seen, {"stream": STREAM}) if draw else seen.iloc[:0]
    number = draw.get("samples")  # None: all test images
    own = own[own["samples"].isna() if number is None else own["samples"] == number]
    counts = {task: int(n) for task, n in zip(own["task"], own["count"], strict=True)}
    shown = flags_of(own["seed"], own["task"], own["seen"], counts)
    answers = {}
    for method in (adapter, "featcal"):
        mine = select(right, {"method": method, "setting": main})
        mine = mine[mine["task"].isin(list(counts))]
        answers[method] = flags_of(mine["seed"], mine["task"], mine["correct"], counts)
    accuracies, on, off = compared(answers["featcal"], answers[adapter], shown)
    worth = mean_margin([(off[s][0] - on[s][0], on[s][1] + off[s][1]) for s in on if s in off])
    return [
        *(f"{a:.1f}" if a is not None else "–" for a in accuracies),
        _said(mean_margin(list(off.values()))),
        _said(worth),
        trained,
    ]


def flags_of(
    seeds: Sequence[str], tasks: Sequence[str], texts: Sequence[str], counts: Mapping[str, int]
) -> Draws:
    """Return the flags of every task by seed."""
    found: dict[str, dict[str, Bits]] = {}
    for seed, task, text in zip(seeds, tasks, texts, strict=True):
        found.setdefault(seed, {})[task] = bits(text, counts[task])
    return dict(found)


def compared(
    featcal: Draws, adapter: Draws, shown: Draws
) -> tuple[list[float | None], dict[str, Margin], dict[str, Margin]]:
    """Return the adapter's accuracy on shown and on other images, and by seed FeatCal minus it on both."""
    seeds = [seed for seed in shown if seed in adapter]
    parts = [
        [share(adapter[seed], shown[seed]) for seed in seeds],
        [share(adapter[seed], others(shown[seed])) for seed in seeds],
    ]
    means = [
        fmean(known) if (known := [p for p in part if p is not None]) else None for part in parts
    ]
    both = [seed for seed in seeds if seed in featcal]
    on = {s: found for s in both if (found := paired(featcal[s], adapter[s], shown[s]))}
    off = {s: found for s in both if (found := paired(featcal[s], adapter[s], others(shown[s])))}
    return means, on, off


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
