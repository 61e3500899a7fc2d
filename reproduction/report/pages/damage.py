"""Table 6 and Figure 4: what damaged calibration samples cost, scored on clean test samples."""

import io
from collections.abc import Iterator
from html import escape
from itertools import product

from matplotlib.figure import Figure

from reproduction.report.claims import studied_setting
from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import CURVES, INK, WIDTH, drawing, legend, one_panel, shown
from reproduction.report.html import PageOutput, fold, listed, margin, note
from reproduction.report.pages import reproduced
from reproduction.report.paper import AVERAGE, REAL, model_name, paper_table
from reproduction.report.statistics import Estimate, estimate, highest
from reproduction.report.tables import (
    METHODS,
    SETTING_LABELS,
    SHORT,
    UPSTREAMS,
    Cell,
    Row,
    accuracy_table,
    settings_shown,
    with_best,
)

KINDS = {
    "clean": "Clean", "gaussian_noise": "Gaussian noise", "motion_blur": "Motion blur", "fog": "Fog",
}  # fmt: skip
UPSTREAM = "task_arithmetic"
ADAPTERS = ("surgery", "prob_surgery")


def kinds(ours: Evidence) -> dict[str, str]:
    """Return the kinds of calibration samples by name: the paper's three, or those of texts."""
    if ours.role != REAL:
        return KINDS
    run = dict.fromkeys(ours.table("corrupted")["corruption"]) or {"clean": None}
    return {kind: _name(kind) for kind in run}


def _name(kind: str) -> str:
    return KINDS.get(kind) or kind.replace("_", " ").replace("-", " ").capitalize()


def found(ours: Evidence, method: str, kind: str = AVERAGE, setting: str = "") -> Estimate | None:
    """Return the mean over tasks from one kind of samples, or over all kinds.

    setting: of FeatCal. Default: the study's; adapters have one setting only.
    """
    rows = select(ours.table("corrupted"), {"upstream": UPSTREAM, "method": method})
    if method != "merged":
        rows = select(rows, {"setting": setting or studied_setting(ours.suite)})
    if kind != AVERAGE:
        return estimate(select(rows, {"corruption": kind}))
    return estimate(rows) if set(rows["corruption"]) == set(kinds(ours)) else None


def answer(ours: Evidence) -> PageOutput:
    """Return FeatCal minus its merger and minus the better adapter by kind of damage."""
    merged, rows = found(ours, "merged", "clean"), []
    best = {k: highest(found(ours, method, k) for method in ADAPTERS) for k in kinds(ours)}
    for setting in settings_shown(ours.suite):
        featcal = {kind: found(ours, "featcal", kind, setting) for kind in kinds(ours)}
        small = f"<small>{SETTING_LABELS[setting]}</small>"
        rows.append([f"its merger {small}", *(margin(one, merged) for one in featcal.values())])
        cells = [margin(one, best[kind]) for kind, one in featcal.items()]
        rows.append([f"the better adapter {small}", *cells])
    caption = f"FeatCal minus each, average accuracy, points — {model_name(ours.role, ours.suite)}"
    return listed(["FeatCal minus", *kinds(ours).values()], rows, caption, "fc-long")


def averages(ours: Evidence) -> PageOutput:
    """Return the table in the paper's order, each number with its change against clean samples."""
    name = model_name(ours.role, ours.suite)
    if ours.table("corrupted").empty:
        return PageOutput(note(f"○ not run: no damaged calibration samples — {name}."))
    rows = [_row(ours, "merged", UPSTREAMS[UPSTREAM])]
    rows += [
        _row(ours, "featcal", f"{METHODS['featcal']}, {SHORT[setting]}", setting)
        for setting in settings_shown(ours.suite)
    ]
    rows += [_row(ours, method, METHODS[method]) for method in ADAPTERS]
    clean, damaged = numbers(ours)
    at = f"n = {clean} clean, {damaged} damaged {ours.inputs} per task"
    caption = f"Average top-1 accuracy (%) on clean test {ours.inputs} by what calibrates — {name}; {at}. Arrows: against clean."
    html = _table(rows, kinds(ours), caption)
    if ours.suite == reproduced.SUITE:
        html += reproduced.shown(list(compared(ours)), "table06")
    return PageOutput(html)


def _table(rows: list[Row], named: dict[str, str], caption: str) -> str:
    columns = named | {AVERAGE: "Average"}
    titles = list(columns.values())
    return accuracy_table(with_best(rows), list(columns), titles, caption, average=False)[0]


def numbers(ours: Evidence) -> tuple[str, str]:
    """Return how many samples per task FeatCal gets, clean and damaged."""
    runs = ours.settings().get("calibrate", {}).values()
    clean = {run["samples"] for run in runs if run.get("calibration")}
    study = ours.settings("corrupted").get("study", {})
    damaged = str(study.get("samples", "–"))
    return damaged if study.get("clean") else ", ".join(map(str, sorted(clean))) or "–", damaged


def _row(ours: Evidence, method: str, name: str, setting: str = "") -> Row:
    """Return one method's averages by kind with changes against clean samples."""
    means = {kind: found(ours, method, kind, setting) for kind in (*kinds(ours), AVERAGE)}
    return _changed(method, name, {k: Cell(one.mean) for k, one in means.items() if one})


def _changed(method: str, name: str, cells: dict[str, Cell]) -> Row:
    if method == "merged":
        cells.pop(AVERAGE, None)
    for kind in set(cells) - {"clean", AVERAGE} if "clean" in cells else ():
        cells[kind] = Cell(cells[kind].value, change=cells[kind].value - cells["clean"].value)
    return Row(name, "merger" if method == "merged" else "calibrated", UPSTREAM, cells)


def printed() -> PageOutput:
    """Return the paper's Table 6, one click away."""
    frame = paper_table("table06").set_index("method")
    rows = []
    for method, label in {"merged": UPSTREAMS[UPSTREAM], **METHODS}.items():
        values = frame.loc[UPSTREAM if method == "merged" else method]
        cells = {k: Cell(float(values[k])) for k in (*KINDS, AVERAGE) if str(values[k])}
        rows.append(_changed(method, label, cells))
    caption = "The paper’s Table 6, as printed: CLIP-ViT-B/32. Arrows: against clean."
    return PageOutput(fold("The paper’s own values", _table(rows, KINDS, caption)))


def compared(ours: Evidence) -> Iterator[reproduced.Compared]:
    """Yield our value for every cell of Table 6, and the mean of a row."""
    for _, row in paper_table("table06").iterrows():
        method = "merged" if row["method"] == UPSTREAM else str(row["method"])
        name = (METHODS | {"merged": UPSTREAMS[UPSTREAM]})[method]
        for column in (*KINDS, AVERAGE):
            value = found(ours, method, column)
            if value is not None and str(row[column]):
                head = KINDS.get(column, column)
                yield reproduced.Compared(name, head, value, float(row[column]))


def strengths(*experiments: Evidence) -> PageOutput:
    """Return how strong each kind of damage is."""
    several = [ours.settings("corrupted").get("strengths", {}) for ours in experiments]
    rows = [[_name(kind), escape(words)] for one in several for kind, words in one.items()]
    caption = "Damage done to calibration samples"
    return listed(["Damage", "Strength"], rows, caption, missing="no settings file yet")


def cost(ours: Evidence) -> PageOutput:
    """Return dots of the average accuracy by method, one line per kind of calibration samples."""
    what, merged = f"accuracies from damaged {ours.inputs}", found(ours, "merged", "clean")
    if merged is None:
        return shown(None, what)
    rows = kinds(ours)
    with one_panel(0.5 * len(rows) + 1.4) as (figure, axes):
        for method in METHODS:
            means = [(i, one.mean) for i, k in enumerate(rows) if (one := found(ours, method, k))]
            look = CURVES[method] | {"edgecolor": "white", "lw": 0.8, "s": 130, "zorder": 3}
            axes.scatter([mean for _, mean in means], [i for i, _ in means], **look)
        axes.axvline(merged.mean, color=INK, ls="--", lw=1.4, label="merger alone")
        axes.set_yticks(range(len(rows)), list(rows.values()))
        axes.invert_yaxis()
        axes.margins(y=0.2)
        axes.set(xlabel=f"average top-1 accuracy (%), clean test {ours.inputs}")
        legend(axes, 2)
        return shown(figure, what)


def examples(ours: Evidence) -> PageOutput:
    """Return calibration images clean and damaged, every pixel as a square."""
    what, sheet = "example images", ours.table("corrupted.examples")
    if sheet.empty:
        return shown(None, what)
    rows, columns = int(sheet["row"].max()) + 1, int(sheet["column"].max()) + 1
    with drawing():
        figure = Figure(figsize=(WIDTH, WIDTH * rows / columns))
        gaps = {"wspace": 0.04, "hspace": 0.04}
        grid = figure.subplots(rows, columns, squeeze=False, gridspec_kw=gaps)
        for place, picture in zip(sheet.itertuples(), _cut(ours, rows, columns), strict=True):
            axes = grid[place.row][place.column]
            axes.imshow(picture, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.grid(visible=False)
            if place.row == 0:
                title = KINDS[place.corruption].replace("Gaussian noise", "Gaussian")
                axes.set_title(title, fontsize=13)
            if place.column == 0:
                axes.set_ylabel(ours.title(place.task))
        return shown(figure, what)


def _cut(ours: Evidence, rows: int, columns: int) -> Iterator[object]:
    """Yield the pictures of the sheet, row by row."""
    from PIL import Image

    data = ours.path("corrupted.examples").with_suffix(".png").read_bytes()
    sheet = Image.open(io.BytesIO(data)).convert("RGB")
    wide, high = sheet.width // columns, sheet.height // rows
    for row, column in product(range(rows), range(columns)):
        yield sheet.crop((wide * column, high * row, wide * (column + 1), high * (row + 1)))
