"""Tables 6 and 12, Figures 3 and 4: accuracy by number of samples, and from damaged samples.

Damage is done to calibration samples only; test samples are clean.
"""

from collections.abc import Iterator
from functools import partial
from html import escape

import pandas as pd
from matplotlib.figure import Figure

from reproduction.report import figures, tables
from reproduction.report.evidence import Evidence
from reproduction.report.html import PageOutput, folded, margin, note, table, tabulate
from reproduction.report.pages import reproduced
from reproduction.report.paper import AVERAGE, REAL, paper_table
from reproduction.report.statistics import Estimate, estimate, highest

KINDS = {
    "clean": "Clean", "gaussian_noise": "Gaussian noise", "motion_blur": "Motion blur", "fog": "Fog",
}  # fmt: skip
UPSTREAM = "task_arithmetic"
STYLES = ("-", (0, (3, 1, 1, 1, 1, 1)))  # of FeatCal's curves, by setting


def by_number_answer(*experiments: Evidence) -> PageOutput:
    """Return FeatCal with the fewest samples against the merger, the most, and the adapters."""
    rows = []
    for data in experiments:
        score = partial(tables.average, data, file="samples")
        merged = score((UPSTREAM, "merged", ""))
        surgery, prob_surgery, *calibrated = _models(data)
        for key in calibrated:
            budgets = tables.rows_of(data, key, "samples")["samples"]
            few, many = budgets.min(), budgets.max()
            featcal = {n: score(key, samples=n) for n in (few, many)}
            cells = [margin(featcal[few], merged), margin(featcal[many], featcal[few])]
            for n, mean in featcal.items():
                adapters = (score(adapter, samples=n) for adapter in (surgery, prob_surgery))
                cells.append(margin(mean, highest(adapters)))
            at = f"<small>{few} and {many} per task, {tables.SHORT[key[2]]}</small>"
            rows.append([f"{data.model_title} {at}", *cells])
    head = ["FeatCal", "Fewest − merger", "Most − fewest", "− better adapter, fewest"]
    head.append("− better adapter, most")
    caption = "Differences of the average accuracy, points. Above, below: by more than two SE."
    return tabulate(head, rows, caption, "fc-long", "not run")


def _models(data: Evidence) -> list[tables.Key]:
    """Return the rows of Table 12: both adapters, then FeatCal where it was run, printed first."""
    settings = tables.settings_of(data)
    adapters = [(UPSTREAM, method, settings[-1]) for method in tables.ADAPTERS]
    featcal = [(UPSTREAM, "featcal", setting) for setting in settings]
    return adapters + [key for key in featcal if len(tables.rows_of(data, key, "samples"))]


def mean_accuracies(data: Evidence) -> pd.DataFrame:
    """Return average accuracy (%) of every method and number of samples, and its deviation."""
    means = []
    for key in _models(data):
        for n, rows in tables.rows_of(data, key, "samples").groupby("samples"):
            if mean := estimate(rows):
                means.append((*key[1:], n, mean.mean, mean.spread))
    columns = ["method", "setting", "samples", "mean", "sd"]
    return pd.DataFrame(means, columns=columns).astype({"sd": float})


def means(data: Evidence) -> PageOutput:
    """Return Table 12: mean and standard deviation over seeds, the best of a column in bold."""
    accuracies = mean_accuracies(data)
    name = data.model_name
    if accuracies.empty:
        return PageOutput(note(f"○ not run: accuracy by number of samples — {name}."))
    merged = tables.average(data, (UPSTREAM, "merged", ""), "samples")
    start = f" Task arithmetic alone: {merged.mean:.1f}." if merged else ""
    caption = f"Average top-1 accuracy (%) by {data.inputs} per task, sd over seeds — {name}.{start} Bold: best."
    labels = {}
    for model in zip(accuracies["method"], accuracies["setting"], strict=True):
        labels[model] = tables.METHODS[model[0]] + tables.method_settings(data, "samples", *model)
    runs = data.table("samples.run")
    fewer = runs[runs["images"] < runs["samples"]][["samples", "images"]].drop_duplicates()
    counts = ", ".join(f"n = {n}: {has}" for n, has in fewer.itertuples(index=False))
    short = f"Largest split of some methods, {data.inputs} per task: {counts}."
    html = _means_table(accuracies, labels, caption) + (note(short) if counts else "")
    if data.suite == reproduced.SUITE:
        html += reproduced.comparison_html(compared_means(data), "table12")
    return PageOutput(html)


def printed_means() -> PageOutput:
    """Return the paper's Table 12, in a fold."""
    names = {"samples_per_task": "samples", "std": "sd"}
    rows = paper_table("table12").rename(columns=names).assign(setting="")
    caption = "The paper’s Table 12, as printed: CLIP-ViT-B/32"
    labels = {(method, ""): name for method, name in tables.METHODS.items()}
    return folded(_means_table(rows, labels, caption))


def _means_table(means: pd.DataFrame, labels: dict[tuple[str, str], str], caption: str) -> str:
    best = means["mean"].round(1).groupby(means["samples"]).max()
    cells = {}
    for row in means.itertuples():
        spread = None if pd.isna(row.sd) else row.sd
        is_best = round(row.mean, 1) == best[row.samples]
        cells[row.method, row.setting, row.samples] = tables.Cell(row.mean, spread, best=is_best)
    rows = []
    for key, label in labels.items():
        rows.append([label, *(tables.cell_html(cells.get((*key, n))) for n in best.index)])
    head = ["Task Arithmetic", *(f"n = {n}" for n in best.index)]
    return table(head, rows, caption, "fc-accuracy")


def compared_means(data: Evidence) -> list[reproduced.Compared]:
    """Return our value for every cell of Table 12, whose deviations over three seeds it prints."""
    cells = []
    for _, cell in paper_table("table12").iterrows():
        method, n = cell["method"], cell["samples_per_task"]
        key = (UPSTREAM, method, tables.settings_of(data)[0])
        if value := tables.average(data, key, "samples", samples=n):
            row, printed = tables.METHODS[method], float(cell["mean"])
            errors = {"spread": float(cell["std"]), "seeds": 3}
            cells.append(reproduced.Compared(row, f"n = {n}", value, printed, **errors))
    return cells


def curves(data: Evidence) -> PageOutput:
    """Return Figure 3: mean over seeds with one standard deviation up and down."""
    title, points = f"accuracy by number of {data.inputs}", mean_accuracies(data)
    if points.empty:
        return figures.figure_output(None, title)
    budgets = sorted(points["samples"].unique())
    with figures.one_panel(4.4) as (figure, axes):
        for (method, setting), curve in points.groupby(["method", "setting"], sort=False):
            style = figures.CURVES[method] | {"linestyle": figures.DASHES[method]}
            style |= {"lw": 2, "ms": 8, "capsize": 4}
            if method == "featcal":
                at = tables.settings_of(data).index(setting)
                label = f"{style['label']}, {tables.SHORT[setting]}"
                style |= {"linestyle": STYLES[at], "label": label}
            axes.errorbar(curve["samples"], curve["mean"], yerr=curve["sd"].fillna(0.0), **style)
        merged = tables.average(data, (UPSTREAM, "merged", ""), "samples")
        if merged is not None:
            style = {"color": figures.COLOURS["merged"], "lw": 1.6, "linestyle": ":"}
            axes.axhline(merged.mean, label="merged, not calibrated", **style)
        axes.set_xscale("log", base=2)
        axes.set_xticks(budgets, [str(n) for n in budgets])
        axes.minorticks_off()
        axes.set(xlabel=f"{data.inputs} per task, n (logarithmic)", ylabel="average accuracy (%)")
        figures.legend(axes, 2, below=True, handlelength=2.6)
        return figures.figure_output(figure, title)


# damaged samples


def kinds(data: Evidence) -> dict[str, str]:
    """Return the names of the kinds of calibration samples: the paper's, or those of texts."""
    corruptions = dict.fromkeys(data.table("corrupted")["corruption"]) or {"clean": None}
    return {kind: _kind_name(kind) for kind in corruptions} if data.role == REAL else KINDS


def _kind_name(kind: str) -> str:
    return KINDS.get(kind) or kind.replace("_", " ").replace("-", " ").capitalize()


def after_damage(data: Evidence, method: str, kind: str, setting: str = "") -> Estimate | None:
    """Return the mean over tasks from one kind of samples, or over all kinds."""
    key = tables.model_key(UPSTREAM, method, setting or tables.settings_of(data)[-1])
    if kind != AVERAGE:
        return tables.average(data, key, "corrupted", corruption=kind)
    rows = tables.rows_of(data, key, "corrupted")
    return estimate(rows) if set(rows["corruption"]) == set(kinds(data)) else None


def damage_answer(data: Evidence) -> PageOutput:
    """Return FeatCal minus its merger and minus the better adapter by kind of damage."""
    merged, rows = after_damage(data, "merged", "clean"), []
    best = {}
    for kind in kinds(data):
        best[kind] = highest(after_damage(data, method, kind) for method in tables.ADAPTERS)
    for setting in tables.settings_of(data):
        featcal = {kind: after_damage(data, "featcal", kind, setting) for kind in kinds(data)}
        small = f"<small>{tables.SHORT[setting]}</small>"
        rows.append([f"its merger {small}", *(margin(mean, merged) for mean in featcal.values())])
        cells = [margin(mean, best[kind]) for kind, mean in featcal.items()]
        rows.append([f"the better adapter {small}", *cells])
    caption = f"FeatCal minus each, average accuracy, points — {data.model_name}"
    return tabulate(["FeatCal minus", *kinds(data).values()], rows, caption, "fc-long")


def damage(data: Evidence) -> PageOutput:
    """Return the table in the paper's order, each number with its change against clean samples."""
    name = data.model_name
    if data.table("corrupted").empty:
        return PageOutput(note(f"○ not run: no damaged calibration samples — {name}."))
    names = {("merged", ""): tables.UPSTREAMS[UPSTREAM]}
    for setting in tables.settings_of(data):
        names["featcal", setting] = f"{tables.METHODS['featcal']}, {tables.SHORT[setting]}"
    names |= {(method, ""): tables.METHODS[method] for method in tables.ADAPTERS}
    rows = []
    for (method, setting), label in names.items():
        by_kind = {k: after_damage(data, method, k, setting) for k in (*kinds(data), AVERAGE)}
        cells = {kind: tables.Cell(mean.mean) for kind, mean in by_kind.items() if mean}
        rows.append(_damage_row(method, label, cells))
    runs, study = data.settings().get("calibrate", {}), data.settings("corrupted").get("study", {})
    samples = {run["samples"] for run in runs.values() if run.get("calibration")}
    damaged = str(study.get("samples", "–"))
    clean = damaged if study.get("clean") else ", ".join(map(str, sorted(samples))) or "–"
    at = f"n = {clean} clean, {damaged} damaged {data.inputs} per task"
    caption = f"Average top-1 accuracy (%) on clean test {data.inputs} by calibration method — {name}; {at}. Arrows: against clean."
    html = _damage_table(rows, kinds(data), caption)
    if data.suite == reproduced.SUITE:
        html += reproduced.comparison_html(list(compared_damage(data)), "table06")
    return PageOutput(html)


def _damage_table(rows: list[tables.ModelRow], titles: dict[str, str], caption: str) -> str:
    columns = titles | {AVERAGE: "Average"}
    return tables.accuracy_table(tables.with_best(rows), columns, caption, average=False)


def _damage_row(method: str, name: str, cells: dict[str, tables.Cell]) -> tables.ModelRow:
    """Return one method's averages by kind, each with its change against clean samples."""
    if method == "merged":
        cells.pop(AVERAGE, None)
    for kind, cell in cells.items() if "clean" in cells else ():
        if kind not in ("clean", AVERAGE):
            cell.change = cell.value - cells["clean"].value
    return tables.ModelRow(name, "merger" if method == "merged" else "calibrated", UPSTREAM, cells)


def printed_damage() -> PageOutput:
    """Return the paper's Table 6, in a fold."""
    frame = paper_table("table06").set_index("method")
    rows = []
    for method, label in {"merged": tables.UPSTREAMS[UPSTREAM], **tables.METHODS}.items():
        values = frame.loc[UPSTREAM if method == "merged" else method]
        cells = {k: tables.Cell(float(values[k])) for k in (*KINDS, AVERAGE) if str(values[k])}
        rows.append(_damage_row(method, label, cells))
    caption = "The paper’s Table 6, as printed: CLIP-ViT-B/32. Arrows: against clean."
    return folded(_damage_table(rows, KINDS, caption))


def compared_damage(data: Evidence) -> Iterator[reproduced.Compared]:
    """Yield our value for every cell of Table 6, and the mean of a row."""
    for _, row in paper_table("table06").iterrows():
        method = "merged" if row["method"] == UPSTREAM else str(row["method"])
        name = (tables.METHODS | {"merged": tables.UPSTREAMS[UPSTREAM]})[method]
        for column in (*KINDS, AVERAGE):
            value = after_damage(data, method, column)
            if value is not None and str(row[column]):
                head = KINDS.get(column, column)
                yield reproduced.Compared(name, head, value, float(row[column]))


def strengths(*experiments: Evidence) -> PageOutput:
    """Return how strong each kind of damage is."""
    rows = []
    for data in experiments:
        by_kind = data.settings("corrupted").get("strengths", {})
        rows += [[_kind_name(kind), escape(strength)] for kind, strength in by_kind.items()]
    caption = "Damage done to calibration samples"
    return tabulate(["Damage", "Strength"], rows, caption, missing="no settings file yet")


def damage_by_kind(data: Evidence) -> PageOutput:
    """Return dots of the average accuracy by method, one line per kind of calibration samples."""
    title, merged = f"accuracies from damaged {data.inputs}", after_damage(data, "merged", "clean")
    if merged is None:
        return figures.figure_output(None, title)
    rows = kinds(data)
    with figures.one_panel(0.5 * len(rows) + 1.4) as (figure, axes):
        for method in tables.METHODS:
            scores = [after_damage(data, method, kind) for kind in rows]
            means = {i: score.mean for i, score in enumerate(scores) if score}
            style = {"edgecolor": "white", "lw": 0.8, "s": 130, "zorder": 3}
            axes.scatter(list(means.values()), list(means), **figures.CURVES[method], **style)
        axes.axvline(merged.mean, color=figures.INK, ls="--", lw=1.4, label="merger alone")
        axes.set_yticks(range(len(rows)), list(rows.values()))
        axes.invert_yaxis()
        axes.margins(y=0.2)
        axes.set(xlabel=f"average top-1 accuracy (%), clean test {data.inputs}")
        figures.legend(axes, 2)
        return figures.figure_output(figure, title)


def examples(data: Evidence) -> PageOutput:
    """Return calibration images clean and damaged, every pixel as a square."""
    from PIL import Image

    name, sheet = "example images", data.table("corrupted.examples")
    if sheet.empty:
        return figures.figure_output(None, name)
    rows, columns = int(sheet["row"].max()) + 1, int(sheet["column"].max()) + 1
    picture = Image.open(data.path("corrupted.examples").with_suffix(".png")).convert("RGB")
    wide, high = picture.width // columns, picture.height // rows
    with figures.drawing():
        figure = Figure(figsize=(figures.WIDTH, figures.WIDTH * rows / columns))
        gaps = {"wspace": 0.04, "hspace": 0.04}
        grid = figure.subplots(rows, columns, squeeze=False, gridspec_kw=gaps)
        for cell in sheet.itertuples():
            axes, left, top = grid[cell.row][cell.column], wide * cell.column, high * cell.row
            axes.imshow(picture.crop((left, top, left + wide, top + high)), interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.grid(visible=False)
            if cell.row == 0:
                title = KINDS[cell.corruption].replace("Gaussian noise", "Gaussian")
                axes.set_title(title, fontsize=13)
            if cell.column == 0:
                axes.set_ylabel(data.title(cell.task))
        return figures.figure_output(figure, name)
