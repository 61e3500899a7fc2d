"""Figures 1, 2, 6 and 7: drift from the experts' features before and after calibration."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import (
    BARS,
    COLOURS,
    MARKERS,
    NAMES,
    WIDTH,
    block_name,
    block_order,
    draw_dots,
    drawing,
    figure_output,
    label_marks,
    legend,
    one_panel,
    stacked,
)
from reproduction.report.html import PageOutput, margin, tabulate
from reproduction.report.statistics import estimate
from reproduction.report.tables import METHODS, SHORT, UPSTREAMS, average, settings_of, short_name

UPSTREAM = "task_arithmetic"
PROJECTED = ("expert", "merged", "featcal")
CLASSES = 10  # whose means are joined in a projection; of more, the most frequent ones
COLUMNS = 2  # panels side by side in Figure 6; more cannot be read at 390 pixels
MEAN = "mean"
PRINTED = "paper"  # setting of FeatCal in the panels; projections were kept at the tuned one
LABELS = {
    "relative_drift": "relative drift (no unit)", "cosine": "cosine to the expert", "l2": "distance to the expert (L2)",
}  # fmt: skip


def features(evidence: Evidence) -> PageOutput:
    """Draw final features of the shown task in two dimensions."""
    points = select(evidence.table("projection"), {"task": evidence.shown_task})
    if points.empty:
        return figure_output(None, "features")
    cosine = mean_cosines(evidence)
    with one_panel(4.8) as (figure, axes):
        shown = {m: value for (m, task), value in cosine.items() if task == evidence.shown_task}
        plane(axes, points, NAMES | {m: f"{NAMES[m]}, {value:.2f}" for m, value in shown.items()})
        axes.set_xlabel("first direction (arbitrary unit)")
        axes.set_ylabel("second direction (arbitrary unit)")
        axes.set_title(f"{evidence.title(evidence.shown_task)}: final features")
        legend(axes, 3, below=True, title="mean cosine to the expert’s")
        return figure_output(figure, "features")


def mark(model: str) -> dict[str, Any]:
    return {"marker": MARKERS[model], "color": COLOURS[model], "edgecolor": "white", "lw": 0.8}


def mean_cosines(evidence: Evidence) -> dict[tuple[str, str], float]:
    """Return mean cosines to the expert's final features, of FeatCal at the projections' setting."""
    rows = evidence.table("alignment")
    rows = rows[(rows["method"] == "merged") | (rows["setting"] == settings_of(evidence)[-1])]
    return {(row.method, row.task): row.cosine for row in rows.itertuples()}


def plane(axes: Axes, points: pd.DataFrame, labels: dict[str, str]) -> None:
    """Draw samples small, means of classes large, and lines from the expert's means to the others'."""
    for model in PROJECTED:
        rows = points[points["model"] == model]
        draw_dots(axes, rows["x"], rows["y"], 3.6, edgecolor=COLOURS[model], alpha=0.35)
    axes.set_aspect("equal", adjustable="datalim")
    samples = points[points["model"] == "expert"]["label"].value_counts()
    largest = sorted(samples.index, key=lambda label: (-samples[label], label))[:CLASSES]
    means = points[points["label"].isin(largest)].groupby(["model", "label"])[["x", "y"]].mean()
    expert = means.loc["expert"]
    for model, style in (("merged", ":"), ("featcal", "-")):
        for label, mean in means.loc[model].iterrows():
            ends = [expert.x[label], mean.x], [expert.y[label], mean.y]
            axes.plot(*ends, style, color=COLOURS[model], lw=1.4, zorder=3)
    for model in PROJECTED:
        marks = means.loc[model]
        axes.scatter(marks.x, marks.y, s=70, zorder=4, label=labels[model], **mark(model))


def distance(evidence: Evidence) -> PageOutput:
    """Draw the distance to the expert's class token after every block on the shown task."""
    rows = select(drift_rows(evidence, "l2"), {"task": evidence.shown_task})
    if rows.empty:
        return figure_output(None, "distance")
    last = rows[rows["position"] == rows["position"].max()].set_index("method")["l2"]
    change, title = last["featcal"] / last["merged"] - 1, evidence.title(evidence.shown_task)
    with one_panel(3.4) as (figure, axes):
        _lines(axes, rows, "l2")
        axes.set_title(f"{title}: after the last block {change:+.0%}")
        return figure_output(figure, "distance")


def drift(evidence: Evidence) -> PageOutput:
    """Draw relative drift (all tokens) and cosine (class token) per block, mean and range."""
    if drift_rows(evidence, "cosine").empty:
        return figure_output(None, "drift")
    with stacked(2, 6.8) as (figure, panels):
        for axes, measure in zip(panels, ("relative_drift", "cosine"), strict=True):
            _lines(axes, drift_rows(evidence, measure), measure)
        return figure_output(figure, "drift")


def drift_rows(evidence: Evidence, measure: str, setting: str = PRINTED) -> pd.DataFrame:
    """Return rows of merged and calibrated model at one setting, with each block's position."""
    rows = evidence.table("drift")
    rows = rows[(rows["method"] == "merged") | (rows["setting"] == setting)]
    rows = rows[rows["block"] != "features"] if measure != "cosine" else rows
    rows = rows if set(rows["method"]) >= {"merged", "featcal"} else rows.iloc[:0]
    order = sorted(rows["block"].unique(), key=block_order)
    return rows.assign(position=rows["block"].map(order.index), model=rows["method"].map(NAMES))


def _lines(axes: Axes, rows: pd.DataFrame, measure: str) -> None:
    """Draw one line per model over the blocks, and a band over the range of tasks."""
    import seaborn as sns

    order = sorted(rows["block"].unique(), key=block_order)
    style: dict[str, Any] = {
        "palette": {name: COLOURS[m] for m, name in NAMES.items()}, "style": "model", "dashes": False,
        "markers": {NAMES[m]: marker for m, marker in MARKERS.items()}, "errorbar": ("pi", 100), "lw": 2, "markersize": 9,
    }  # fmt: skip
    sns.lineplot(rows, x="position", y=measure, hue="model", ax=axes, **style)
    turned = 0 if len(order) < 10 else 90
    axes.set_xticks(range(len(order)), map(block_name, order), rotation=turned)
    axes.set(xlabel="after block", ylabel=LABELS[measure])
    axes.set_ylim(*((None, 1.02) if measure == "cosine" else (0, None)))
    axes.legend(title=None)


def accuracies(evidence: Evidence) -> PageOutput:
    """Draw accuracy per task as bars: base, merged, calibrated, expert."""
    means = {}
    for name in BARS:
        columns = model(name) if name in ("merged", "featcal") else {"method": name}
        means[name] = select(evidence.table("scores"), columns).groupby("task")["value"].mean()
    if means["merged"].empty or means["featcal"].empty:
        return figure_output(None, "accuracies")
    tasks = evidence.tasks
    with one_panel(0.75 * len(tasks) + 1.4) as (figure, axes):
        for i, (name, values) in enumerate(means.items()):
            heights = [t + (i - 1.5) * 0.2 for t in range(len(tasks))]
            lengths = [values.get(task, 0.0) for task in tasks]
            style = {"lw": 0.4} | BARS[name]
            axes.barh(heights, lengths, height=0.18, label=NAMES[name], **style)
        axes.set_yticks(range(len(tasks)), [evidence.title(task) for task in tasks])
        axes.invert_yaxis()
        axes.set(xlabel="top-1 accuracy (%)", xlim=(0, 100))
        axes.grid(axis="y", visible=False)
        legend(axes, 4, handlelength=1.4)
        return figure_output(figure, "accuracies")


def planes(evidence: Evidence) -> PageOutput:
    """Draw Figure 6: a panel per task with the mean cosine to the expert before and after."""
    points, cosine = evidence.table("projection"), mean_cosines(evidence)
    tasks = [task for task in evidence.tasks if task in set(points["task"])]
    if not tasks:
        return figure_output(None, "planes")
    with drawing():
        lines = -(-len(tasks) // COLUMNS)
        figure = Figure(figsize=(WIDTH, 2.75 * lines + 0.5), layout="constrained")
        panels = figure.subplots(lines, COLUMNS, squeeze=False).flatten()
        for axes, task in zip(panels, tasks, strict=False):
            plane(axes, select(points, {"task": task}), NAMES)
            means = [f"{cosine[m, task]:.2f}" for m in ("merged", "featcal") if (m, task) in cosine]
            axes.set_title(f"{evidence.title(task)}\n{' → '.join(means)}", fontsize=13)
            axes.set(xticks=[], yticks=[])  # arbitrary units, and of each panel its own
        for axes in panels[len(tasks) :]:
            axes.set_axis_off()
        handles, _ = panels[0].get_legend_handles_labels()
        figure.legend(handles, [NAMES[m] for m in PROJECTED], loc="outside upper center", ncols=3)
        return figure_output(figure, "planes")


def model(method: str, setting: str = PRINTED) -> dict[str, str]:
    """Return the column values that name one model."""
    setting = "" if method == "merged" else setting
    return {"upstream": UPSTREAM, "method": method, "setting": setting}


def alignment(evidence: Evidence, adapter: str) -> PageOutput:
    """Draw the mean cosine of final features to the expert's by task and over tasks."""
    axis_label = "mean cosine to the expert’s features (no unit)"
    return _cosines(evidence, "alignment", ("merged", adapter, "featcal"), axis_label)


def vectors(evidence: Evidence) -> PageOutput:
    """Draw the cosine of a model's change from the base to its expert's, before and after."""
    return _cosines(evidence, "vectors", ("merged", "featcal"), "cosine of task vectors (no unit)")


def _cosines(evidence: Evidence, table: str, methods: Sequence[str], axis_label: str) -> PageOutput:
    """Draw dots by task from top to bottom, their mean set apart below."""
    part = {"part": "backbone"} if table == "vectors" else {}
    frame = evidence.table(table)
    rows_by_method = {method: select(frame, model(method) | part) for method in methods}
    if any(rows.empty for rows in rows_by_method.values()):
        return figure_output(None, table)
    names = [*map(evidence.title, evidence.tasks), MEAN]
    with one_panel(0.42 * len(evidence.tasks) + 2.2) as (figure, axes):
        for method, rows in rows_by_method.items():
            values = rows.set_index("task")["cosine"]
            dots = [*(values[task] for task in evidence.tasks), values.mean()]
            style = {"label": NAMES[method], "s": 80, "zorder": 3}
            axes.scatter(dots, range(len(names)), **style, **mark(method))
        if table == "vectors":
            axes.axvline(0, color=COLOURS["expert"], lw=1)
        axes.set_yticks(range(len(names)), names)
        axes.axhline(len(names) - 1.5, color=COLOURS["base"], lw=1)
        axes.invert_yaxis()
        axes.set_xlabel(axis_label)
        legend(axes, 3)
        return figure_output(figure, table)


def images(evidence: Evidence, adapter: str) -> PageOutput:
    """Draw every sample of the shown task by its cosine with the adapter and with FeatCal."""
    keys = ({"method": method, "setting": PRINTED} for method in (adapter, "featcal"))
    pair = [select(evidence.table("similarity"), key).set_index("index") for key in keys]
    if any(rows.empty for rows in pair):
        return figure_output(None, "images")
    across, up = (rows["similarity"] for rows in pair)
    with one_panel(4.9) as (figure, axes):
        draw_dots(axes, across, up[across.index], 4, edgecolor=COLOURS["featcal"], alpha=0.4)
        low, high = min(across.min(), up.min()), max(across.max(), up.max())
        axes.plot([low, high], [low, high], color=COLOURS["expert"], lw=1.2, ls="--")
        style = {"marker": "+", "s": 260, "color": "black", "lw": 2.4, "zorder": 4}
        axes.scatter(across.mean(), up.mean(), label="mean", **style)
        above = int((up[across.index] > across).sum())
        task, label = evidence.title(evidence.shown_task), f"cosine with {NAMES[adapter]} (no unit)"
        axes.set_title(f"{task}: {above} of {len(across)} above the line")
        axes.set(xlabel=label, ylabel="cosine with FeatCal (no unit)")
        axes.legend()
        return figure_output(figure, "images")


def gains(evidence: Evidence, adapter: str) -> PageOutput:
    """Draw gain in cosine against gain in accuracy over the adapter, a mark per task."""
    rows = evidence.gains(model("featcal"), model(adapter))
    if rows.empty:
        return figure_output(None, "gains")
    with one_panel(4.9) as (figure, axes):
        axes.axhline(0, color=COLOURS["expert"], lw=1)
        axes.axvline(0, color=COLOURS["expert"], lw=1)
        bars = {"xerr": rows["cosine_noise"], "yerr": rows["accuracy_noise"], "elinewidth": 0.8}
        style = {"fmt": MARKERS["featcal"], "ms": 9, "color": COLOURS["featcal"]}
        axes.errorbar(rows["cosine"], rows["accuracy"], ecolor="#999999", **style, **bars)
        axes.margins(x=0.18, y=0.1)
        points = {evidence.title(row.task): (row.cosine, row.accuracy) for row in rows.itertuples()}
        label_marks(axes, points)
        compared = f"FeatCal minus {NAMES[adapter]}"
        axes.set(xlabel=f"gain in cosine, {compared} (no unit)", ylabel="gain in accuracy (points)")
        return figure_output(figure, "gains")


def answer(*experiments: Evidence) -> PageOutput:
    """Return cosine, drift and accuracy before and after calibration, means over tasks."""
    rows = []
    for data in experiments:
        merged = average(data, (UPSTREAM, "merged", ""))
        for setting in settings_of(data):
            cells = [f"{data.model_title} <small>{SHORT[setting]}</small>"]
            for measure in ("cosine", "relative_drift"):
                drifts = drift_rows(data, measure, setting)  # cosines end with the final features
                last = drifts[drifts["position"] == drifts["position"].max()]
                means = last.groupby("method")[measure].mean()
                text = f"{means['merged']:.2f} → {means['featcal']:.2f}" if len(means) > 1 else ""
                cells.append(text or "not run")
            featcal = average(data, (UPSTREAM, "featcal", setting))
            rows.append([*cells, margin(featcal, merged)])
    head = ["Merged → FeatCal", "Cosine of final features to the expert’s"]
    head += ["Relative drift after the last block", "Accuracy, points"]
    caption = "Task arithmetic before and after calibration, means over tasks"
    return tabulate(head, rows, caption, "fc-long")


def against_answer(adapter: str, *experiments: Evidence) -> PageOutput:
    """Return accuracy and cosines of the merged model, with the adapter and with FeatCal."""
    rows = []
    for data in experiments:
        models = [("merged", "")]
        models += [(m, s) for s in settings_of(data) for m in (adapter, "featcal")]
        for method, setting in models:
            columns = model(method, setting)
            aligned = select(data.table("alignment"), columns)
            seed = {"seed": aligned["seed"].iloc[0]} if len(aligned) else {}
            accuracy = estimate(select(data.table("scores"), columns | seed))
            changes = select(data.table("vectors"), columns | {"part": "backbone"})
            cells = [f"{accuracy.mean:.1f}" if accuracy and len(aligned) else "not run"]
            cells.append(f"{aligned['cosine'].mean():.3f}" if len(aligned) else "–")
            cells.append(f"{changes['cosine'].mean():.3f}" if len(changes) else "as merged")
            name = (METHODS | {"merged": UPSTREAMS[UPSTREAM]})[method]
            at = ", ".join(filter(None, (data.model_name, short_name(method, setting))))
            rows.append(("" if setting else "fc-merger", [f"{name} <small>{at}</small>", *cells]))
    head = ["", "Accuracy (%)", "Cosine of final features", "Cosine of task vectors"]
    return tabulate(head, rows, "Means over tasks, one seed; cosines to the expert’s")
