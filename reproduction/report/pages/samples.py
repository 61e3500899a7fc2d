"""Tables 6 and 12, Figures 3 and 4: how many samples calibration needs, and what damaged ones cost.

Damage is done to calibration samples only; test samples are clean.
"""

from collections.abc import Iterator
from html import escape

import pandas as pd
from matplotlib.figure import Figure

from reproduction.report import figures, tables
from reproduction.report.evidence import Evidence, select
from reproduction.report.html import PageOutput, listed, margin, note, printed, table
from reproduction.report.pages import reproduced
from reproduction.report.paper import AVERAGE, REAL, model_name, model_title, paper_table
from reproduction.report.statistics import Estimate, estimate, highest

KINDS = {
    "clean": "Clean", "gaussian_noise": "Gaussian noise", "motion_blur": "Motion blur", "fog": "Fog",
}  # fmt: skip
UPSTREAM = "task_arithmetic"
STYLES = ("-", (0, (3, 1, 1, 1, 1, 1)))  # of FeatCal's curves, by setting


def by_number_answer(*experiments: Evidence) -> PageOutput:
    """Return FeatCal with the fewest samples against the merger, the most, and the adapters."""
    rows = []
    for ours in experiments:
        merged = tables.average(ours, (UPSTREAM, "merged", ""), "samples")
        surgery, prob_surgery, *calibrated = _order(ours)
        for method, setting in calibrated:
            budgets = _rows(ours, method, setting)["samples"]
            few, many = budgets.min(), budgets.max()
            ends = {n: _at(ours, method, setting, n) for n in (few, many)}
            best = {n: highest(_at(ours, *one, n) for one in (surgery, prob_surgery)) for n in ends}
            cells = [margin(ends[few], merged), margin(ends[many], ends[few])]
            cells += [margin(one, best[n]) for n, one in ends.items()]
            at = f"<small>{few} and {many} per task, {tables.SHORT[setting]}</small>"
            rows.append([f"{model_title(ours.role, ours.suite)} {at}", *cells])
    head = ["FeatCal", "Fewest − merger", "Most − fewest", "− better adapter, fewest"]
    head.append("− better adapter, most")
    caption = "Differences of the average accuracy, points. Above, below: by more than two SE."
    return listed(head, rows, caption, "fc-long", "not run")


def _order(ours: Evidence) -> list[tuple[str, str]]:
    """Return the rows of Table 12, method and setting: adapters, then FeatCal, printed first."""
    settings = tables.settings_of(ours)
    adapters = [(method, settings[-1]) for method in tables.ADAPTERS]
    return adapters + [("featcal", one) for one in settings if len(_rows(ours, "featcal", one))]


def _rows(ours: Evidence, method: str, setting: str) -> pd.DataFrame:
    key = {"upstream": UPSTREAM, "setting": setting, "method": method}
    return select(ours.table("samples"), key)


def _at(ours: Evidence, method: str, setting: str, samples: int) -> Estimate | None:
    return estimate(select(_rows(ours, method, setting), {"samples": samples}))


def measured(ours: Evidence) -> pd.DataFrame:
    """Return average accuracy (%) of every method and number of samples, and its deviation."""
    found = []
    for key in _order(ours):
        groups = ((n, estimate(own)) for n, own in _rows(ours, *key).groupby("samples"))
        found += [(*key, n, one.mean, one.spread) for n, one in groups if one]
    columns = ["method", "setting", "samples", "mean", "sd"]
    return pd.DataFrame(found, columns=columns).astype({"sd": float})


def means(ours: Evidence) -> PageOutput:
    """Return Table 12: mean and standard deviation over seeds, the best of a column in bold."""
    found = measured(ours)
    name = model_name(ours.role, ours.suite)
    if found.empty:
        return PageOutput(note(f"○ not run: accuracy by number of samples — {name}."))
    merged = tables.average(ours, (UPSTREAM, "merged", ""), "samples")
    start = f" Task arithmetic alone: {merged.mean:.1f}." if merged else ""
    caption = f"Average top-1 accuracy (%) by {ours.inputs} per task, sd over seeds — {name}.{start} Bold: best."
    labels = dict.fromkeys(zip(found["method"], found["setting"], strict=True), "")
    for method, setting in labels:
        words = tables.method_settings(ours, "samples", method, setting)
        labels[method, setting] = tables.METHODS[method] + words
    runs = ours.table("samples.run")
    fewer = runs[runs["images"] < runs["samples"]][["samples", "images"]].drop_duplicates()
    counts = ", ".join(f"n = {n}: {has}" for n, has in fewer.itertuples(index=False))
    short = f"Largest split of some methods, {ours.inputs} per task: {counts}."
    html = _means_table(found, labels, caption) + (note(short) if counts else "")
    if ours.suite == reproduced.SUITE:
        html += reproduced.shown(compared_means(ours), "table12")
    return PageOutput(html)


def printed_means() -> PageOutput:
    """Return the paper's Table 12, one click away."""
    found = paper_table("table12").rename(columns={"samples_per_task": "samples", "std": "sd"})
    caption = "The paper’s Table 12, as printed: CLIP-ViT-B/32"
    labels = {(method, ""): name for method, name in tables.METHODS.items()}
    return printed(_means_table(found.assign(setting=""), labels, caption))


def _means_table(found: pd.DataFrame, labels: dict[tuple[str, str], str], caption: str) -> str:
    best = found["mean"].round(1).groupby(found["samples"]).max()
    cells = {}
    for one in found.itertuples():
        spread, top = one.sd if one.sd == one.sd else None, round(one.mean, 1) == best[one.samples]
        cells[one.method, one.setting, one.samples] = tables.Cell(one.mean, spread, best=top)
    rows = []
    for key, label in labels.items():
        rows.append([label, *(tables.number(cells.get((*key, n))) for n in best.index)])
    head = ["Task Arithmetic", *(f"n = {n}" for n in best.index)]
    return table(head, rows, caption, "fc-accuracy")


def compared_means(ours: Evidence) -> list[reproduced.Compared]:
    """Return our value for every cell of Table 12, whose deviations over three seeds it prints."""
    cells = []
    for _, cell in paper_table("table12").iterrows():
        method, n = cell["method"], cell["samples_per_task"]
        if value := _at(ours, method, tables.settings_of(ours)[0], n):
            both = {"printed": float(cell["mean"]), "spread": float(cell["std"]), "seeds": 3}
            cells.append(reproduced.Compared(tables.METHODS[method], f"n = {n}", value, **both))
    return cells


def curves(ours: Evidence) -> PageOutput:
    """Return Figure 3: mean over seeds with one standard deviation up and down."""
    what, points = f"accuracy by number of {ours.inputs}", measured(ours)
    if points.empty:
        return figures.shown(None, what)
    budgets = sorted(points["samples"].unique())
    with figures.one_panel(4.4) as (figure, axes):
        for (method, setting), own in points.groupby(["method", "setting"], sort=False):
            look = figures.CURVES[method] | {"linestyle": figures.DASHES[method]}
            look |= {"lw": 2, "ms": 8, "capsize": 4}
            if method == "featcal":
                at = tables.settings_of(ours).index(setting)
                label = f"{look['label']}, {tables.SHORT[setting]}"
                look |= {"linestyle": STYLES[at], "label": label}
            axes.errorbar(own["samples"], own["mean"], yerr=own["sd"].fillna(0.0), **look)
        merged = tables.average(ours, (UPSTREAM, "merged", ""), "samples")
        if merged is not None:
            look = {"color": figures.COLOURS["merged"], "lw": 1.6, "linestyle": ":"}
            axes.axhline(merged.mean, label="merged, not calibrated", **look)
        axes.set_xscale("log", base=2)
        axes.set_xticks(budgets, [str(n) for n in budgets])
        axes.minorticks_off()
        axes.set(xlabel=f"{ours.inputs} per task, n (logarithmic)", ylabel="average accuracy (%)")
        figures.legend(axes, 2, below=True, handlelength=2.6)
        return figures.shown(figure, what)


# damaged samples


def kinds(ours: Evidence) -> dict[str, str]:
    """Return the kinds of calibration samples by name: the paper's three, or those of texts."""
    run = dict.fromkeys(ours.table("corrupted")["corruption"]) or {"clean": None}
    return {kind: _name(kind) for kind in run} if ours.role == REAL else KINDS


def _name(kind: str) -> str:
    return KINDS.get(kind) or kind.replace("_", " ").replace("-", " ").capitalize()


def after_damage(ours: Evidence, method: str, kind: str, setting: str = "") -> Estimate | None:
    """Return the mean over tasks from one kind of samples, or over all kinds."""
    rows = select(ours.table("corrupted"), {"upstream": UPSTREAM, "method": method})
    if method != "merged":
        rows = select(rows, {"setting": setting or tables.settings_of(ours)[-1]})
    if kind != AVERAGE:
        return estimate(select(rows, {"corruption": kind}))
    return estimate(rows) if set(rows["corruption"]) == set(kinds(ours)) else None


def damage_answer(ours: Evidence) -> PageOutput:
    """Return FeatCal minus its merger and minus the better adapter by kind of damage."""
    merged, rows = after_damage(ours, "merged", "clean"), []
    best = {}
    for kind in kinds(ours):
        best[kind] = highest(after_damage(ours, method, kind) for method in tables.ADAPTERS)
    for setting in tables.settings_of(ours):
        featcal = {kind: after_damage(ours, "featcal", kind, setting) for kind in kinds(ours)}
        small = f"<small>{tables.SHORT[setting]}</small>"
        rows.append([f"its merger {small}", *(margin(one, merged) for one in featcal.values())])
        cells = [margin(one, best[kind]) for kind, one in featcal.items()]
        rows.append([f"the better adapter {small}", *cells])
    caption = f"FeatCal minus each, average accuracy, points — {model_name(ours.role, ours.suite)}"
    return listed(["FeatCal minus", *kinds(ours).values()], rows, caption, "fc-long")


def damage(ours: Evidence) -> PageOutput:
    """Return the table in the paper's order, each number with its change against clean samples."""
    name = model_name(ours.role, ours.suite)
    if ours.table("corrupted").empty:
        return PageOutput(note(f"○ not run: no damaged calibration samples — {name}."))
    names = {("merged", ""): tables.UPSTREAMS[UPSTREAM]}
    for setting in tables.settings_of(ours):
        names["featcal", setting] = f"{tables.METHODS['featcal']}, {tables.SHORT[setting]}"
    names |= {(method, ""): tables.METHODS[method] for method in tables.ADAPTERS}
    rows = []
    for (method, setting), label in names.items():
        found = {k: after_damage(ours, method, k, setting) for k in (*kinds(ours), AVERAGE)}
        cells = {kind: tables.Cell(one.mean) for kind, one in found.items() if one}
        rows.append(_row(method, label, cells))
    runs, study = ours.settings().get("calibrate", {}), ours.settings("corrupted").get("study", {})
    samples = {run["samples"] for run in runs.values() if run.get("calibration")}
    damaged = str(study.get("samples", "–"))
    clean = damaged if study.get("clean") else ", ".join(map(str, sorted(samples))) or "–"
    at = f"n = {clean} clean, {damaged} damaged {ours.inputs} per task"
    caption = f"Average top-1 accuracy (%) on clean test {ours.inputs} by calibration method — {name}; {at}. Arrows: against clean."
    html = _table(rows, kinds(ours), caption)
    if ours.suite == reproduced.SUITE:
        html += reproduced.shown(list(compared_damage(ours)), "table06")
    return PageOutput(html)


def _table(rows: list[tables.ModelRow], named: dict[str, str], caption: str) -> str:
    columns = named | {AVERAGE: "Average"}
    return tables.accuracy_table(tables.with_best(rows), columns, caption, average=False)


def _row(method: str, name: str, cells: dict[str, tables.Cell]) -> tables.ModelRow:
    """Return one method's averages by kind, each with its change against clean samples."""
    if method == "merged":
        cells.pop(AVERAGE, None)
    for kind, cell in cells.items() if "clean" in cells else ():
        if kind not in ("clean", AVERAGE):
            cell.change = cell.value - cells["clean"].value
    return tables.ModelRow(name, "merger" if method == "merged" else "calibrated", UPSTREAM, cells)


def printed_damage() -> PageOutput:
    """Return the paper's Table 6, one click away."""
    frame = paper_table("table06").set_index("method")
    rows = []
    for method, label in {"merged": tables.UPSTREAMS[UPSTREAM], **tables.METHODS}.items():
        values = frame.loc[UPSTREAM if method == "merged" else method]
        cells = {k: tables.Cell(float(values[k])) for k in (*KINDS, AVERAGE) if str(values[k])}
        rows.append(_row(method, label, cells))
    caption = "The paper’s Table 6, as printed: CLIP-ViT-B/32. Arrows: against clean."
    return printed(_table(rows, KINDS, caption))


def compared_damage(ours: Evidence) -> Iterator[reproduced.Compared]:
    """Yield our value for every cell of Table 6, and the mean of a row."""
    for _, row in paper_table("table06").iterrows():
        method = "merged" if row["method"] == UPSTREAM else str(row["method"])
        name = (tables.METHODS | {"merged": tables.UPSTREAMS[UPSTREAM]})[method]
        for column in (*KINDS, AVERAGE):
            value = after_damage(ours, method, column)
            if value is not None and str(row[column]):
                head = KINDS.get(column, column)
                yield reproduced.Compared(name, head, value, float(row[column]))


def strengths(*experiments: Evidence) -> PageOutput:
    """Return how strong each kind of damage is."""
    several = [ours.settings("corrupted").get("strengths", {}) for ours in experiments]
    rows = [[_name(kind), escape(words)] for one in several for kind, words in one.items()]
    caption = "Damage done to calibration samples"
    return listed(["Damage", "Strength"], rows, caption, missing="no settings file yet")


def damage_by_kind(ours: Evidence) -> PageOutput:
    """Return dots of the average accuracy by method, one line per kind of calibration samples."""
    what, merged = f"accuracies from damaged {ours.inputs}", after_damage(ours, "merged", "clean")
    if merged is None:
        return figures.shown(None, what)
    rows = kinds(ours)
    with figures.one_panel(0.5 * len(rows) + 1.4) as (figure, axes):
        for method in tables.METHODS:
            found = [after_damage(ours, method, kind) for kind in rows]
            means = {i: one.mean for i, one in enumerate(found) if one}
            look = figures.CURVES[method] | {"edgecolor": "white", "lw": 0.8, "s": 130, "zorder": 3}
            axes.scatter(list(means.values()), list(means), **look)
        axes.axvline(merged.mean, color=figures.INK, ls="--", lw=1.4, label="merger alone")
        axes.set_yticks(range(len(rows)), list(rows.values()))
        axes.invert_yaxis()
        axes.margins(y=0.2)
        axes.set(xlabel=f"average top-1 accuracy (%), clean test {ours.inputs}")
        figures.legend(axes, 2)
        return figures.shown(figure, what)


def examples(ours: Evidence) -> PageOutput:
    """Return calibration images clean and damaged, every pixel as a square."""
    from PIL import Image

    what, sheet = "example images", ours.table("corrupted.examples")
    if sheet.empty:
        return figures.shown(None, what)
    rows, columns = int(sheet["row"].max()) + 1, int(sheet["column"].max()) + 1
    picture = Image.open(ours.path("corrupted.examples").with_suffix(".png")).convert("RGB")
    wide, high = picture.width // columns, picture.height // rows
    with figures.drawing():
        figure = Figure(figsize=(figures.WIDTH, figures.WIDTH * rows / columns))
        gaps = {"wspace": 0.04, "hspace": 0.04}
        grid = figure.subplots(rows, columns, squeeze=False, gridspec_kw=gaps)
        for place in sheet.itertuples():
            axes, left, top = grid[place.row][place.column], wide * place.column, high * place.row
            axes.imshow(picture.crop((left, top, left + wide, top + high)), interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.grid(visible=False)
            if place.row == 0:
                title = KINDS[place.corruption].replace("Gaussian noise", "Gaussian")
                axes.set_title(title, fontsize=13)
            if place.column == 0:
                axes.set_ylabel(ours.title(place.task))
        return figures.shown(figure, what)
