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
    depth,
    drawing,
    legend,
    named,
    one_panel,
    shown,
    specks,
    stacked,
)
from reproduction.report.html import PageOutput, listed, margin
from reproduction.report.paper import model_name, model_title
from reproduction.report.statistics import estimate
from reproduction.report.tables import METHODS, SHORT, UPSTREAMS, average, settings_of

UPSTREAM = "task_arithmetic"
PROJECTED = ("expert", "merged", "featcal")
CLASSES = 10  # whose means are joined in a projection; of more, the most frequent ones
COLUMNS = 2  # panels side by side in Figure 6; more cannot be read at 390 pixels
MEAN = "mean"
PRINTED = "paper"  # setting of FeatCal in the panels; projections were kept at the tuned one


def features(evidence: Evidence) -> PageOutput:
    """Draw final features of the shown task in two dimensions."""
    points = select(evidence.table("projection"), {"task": evidence.shown})
    if points.empty:
        return shown(None, "features")
    cosine = mean_cosines(evidence)
    with one_panel(4.8) as (figure, axes):
        own = {m: value for (m, task), value in cosine.items() if task == evidence.shown}
        plane(axes, points, NAMES | {m: f"{NAMES[m]}, {value:.2f}" for m, value in own.items()})
        axes.set_xlabel("first direction (arbitrary unit)")
        axes.set_ylabel("second direction (arbitrary unit)")
        axes.set_title(f"{evidence.title(evidence.shown)}: final features")
        legend(axes, 3, below=True, title="mean cosine to the expert’s")
        return shown(figure, "features")


def mark(model: str) -> dict[str, Any]:
    """Return the look of one model's marks."""
    return {"marker": MARKERS[model], "color": COLOURS[model], "edgecolor": "white", "lw": 0.8}


def mean_cosines(evidence: Evidence) -> dict[tuple[str, str], float]:
    """Return the mean cosine to the expert's final features, of FeatCal at the projections' setting."""
    rows = evidence.table("alignment")
    rows = rows[(rows["method"] == "merged") | (rows["setting"] == settings_of(evidence)[-1])]
    return {(row.method, row.task): row.cosine for row in rows.itertuples()}


def plane(axes: Axes, points: pd.DataFrame, labels: dict[str, str]) -> None:
    """Draw samples small, means of classes large, and lines from the expert's means to the others'."""
    for model in PROJECTED:
        rows = points[points["model"] == model]
        specks(axes, rows["x"], rows["y"], 3.6, edgecolor=COLOURS[model], alpha=0.35)
    axes.set_aspect("equal", adjustable="datalim")
    images = points[points["model"] == "expert"]["label"].value_counts()
    joined = sorted(images.index, key=lambda label: (-images[label], label))[:CLASSES]
    means = points[points["label"].isin(joined)].groupby(["model", "label"])[["x", "y"]].mean()
    expert = means.loc["expert"]
    for model, style in (("merged", ":"), ("featcal", "-")):
        for label, place in means.loc[model].iterrows():
            ends = [expert.x[label], place.x], [expert.y[label], place.y]
            axes.plot(*ends, style, color=COLOURS[model], lw=1.4, zorder=3)
    for model in PROJECTED:
        own = means.loc[model]
        axes.scatter(own.x, own.y, s=70, zorder=4, label=labels[model], **mark(model))


def distance(evidence: Evidence) -> PageOutput:
    """Draw the distance to the expert's class token after every block on the shown task."""
    rows = select(drift_rows(evidence, "l2"), {"task": evidence.shown})
    if rows.empty:
        return shown(None, "distance")
    last = rows[rows["place"] == rows["place"].max()].set_index("method")["l2"]
    change = last["featcal"] / last["merged"] - 1
    with one_panel(3.4) as (figure, axes):
        _lines(axes, rows, "l2")
        axes.set_title(f"{evidence.title(evidence.shown)}: after the last block {change:+.0%}")
        return shown(figure, "distance")


def drift(evidence: Evidence) -> PageOutput:
    """Draw relative drift (all tokens) and cosine (class token) per block, mean and range."""
    if drift_rows(evidence, "cosine").empty:
        return shown(None, "drift")
    with stacked(2, 6.8) as (figure, panels):
        for axes, measure in zip(panels, ("relative_drift", "cosine"), strict=True):
            _lines(axes, drift_rows(evidence, measure), measure)
        return shown(figure, "drift")


def drift_rows(evidence: Evidence, measure: str, setting: str = PRINTED) -> pd.DataFrame:
    """Return rows of merged and calibrated model at one setting, with each block's place."""
    rows = evidence.table("drift")
    rows = rows[(rows["method"] == "merged") | (rows["setting"] == setting)]
    rows = rows[rows["block"] != "features"] if measure != "cosine" else rows
    rows = rows if set(rows["method"]) >= {"merged", "featcal"} else rows.iloc[:0]
    order = sorted(rows["block"].unique(), key=depth)
    return rows.assign(place=rows["block"].map(order.index), model=rows["method"].map(NAMES))


def _lines(axes: Axes, rows: pd.DataFrame, measure: str) -> None:
    """Draw one line per model over the blocks, and a band over the range of tasks."""
    import seaborn as sns

    order = sorted(rows["block"].unique(), key=depth)
    style: dict[str, Any] = {
        "palette": {name: COLOURS[m] for m, name in NAMES.items()}, "style": "model", "dashes": False,
        "markers": {NAMES[m]: marker for m, marker in MARKERS.items()}, "errorbar": ("pi", 100), "lw": 2, "markersize": 9,
    }  # fmt: skip
    sns.lineplot(rows, x="place", y=measure, hue="model", ax=axes, **style)
    turned = 0 if len(order) < 10 else 90
    axes.set_xticks(range(len(order)), map(block_name, order), rotation=turned)
    axes.set(xlabel="after block", ylabel=_LABELS[measure])
    axes.set_ylim(*((None, 1.02) if measure == "cosine" else (0, None)))
    axes.legend(title=None)


_LABELS = {
    "relative_drift": "relative drift (no unit)", "cosine": "cosine to the expert", "l2": "distance to the expert (L2)",
}  # fmt: skip


def accuracies(evidence: Evidence) -> PageOutput:
    """Draw accuracy per task as bars: base, merged, calibrated, expert."""
    means = {}
    for name in BARS:
        wanted = model(name) if name in ("merged", "featcal") else {"method": name}
        means[name] = select(evidence.table("scores"), wanted).groupby("task")["value"].mean()
    if means["merged"].empty or means["featcal"].empty:
        return shown(None, "accuracies")
    tasks = evidence.tasks
    with one_panel(0.75 * len(tasks) + 1.4) as (figure, axes):
        for i, (name, values) in enumerate(means.items()):
            places = [t + (i - 1.5) * 0.2 for t in range(len(tasks))]
            lengths = [values.get(task, 0.0) for task in tasks]
            axes.barh(places, lengths, height=0.18, label=NAMES[name], **({"lw": 0.4} | BARS[name]))
        axes.set_yticks(range(len(tasks)), [evidence.title(task) for task in tasks])
        axes.invert_yaxis()
        axes.set(xlabel="top-1 accuracy (%)", xlim=(0, 100))
        axes.grid(axis="y", visible=False)
        legend(axes, 4, handlelength=1.4)
        return shown(figure, "accuracies")


def planes(evidence: Evidence) -> PageOutput:
    """Draw Figure 6: a panel per task with the mean cosine to the expert before and after."""
    points, cosine = evidence.table("projection"), mean_cosines(evidence)
    tasks = [task for task in evidence.tasks if task in set(points["task"])]
    if not tasks:
        return shown(None, "planes")
    with drawing():
        lines = -(-len(tasks) // COLUMNS)
        figure = Figure(figsize=(WIDTH, 2.75 * lines + 0.5), layout="constrained")
        panels = figure.subplots(lines, COLUMNS, squeeze=False).flatten()
        for axes, task in zip(panels, tasks, strict=False):
            plane(axes, select(points, {"task": task}), NAMES)
            both = [f"{cosine[m, task]:.2f}" for m in ("merged", "featcal") if (m, task) in cosine]
            axes.set_title(f"{evidence.title(task)}\n{' → '.join(both)}", fontsize=13)
            axes.set(xticks=[], yticks=[])  # arbitrary units, and of each panel its own
        for axes in panels[len(tasks) :]:
            axes.set_axis_off()
        handles, _ = panels[0].get_legend_handles_labels()
        figure.legend(handles, [NAMES[m] for m in PROJECTED], loc="outside upper center", ncols=3)
        return shown(figure, "planes")


def model(method: str, setting: str = PRINTED) -> dict[str, str]:
    """Return the column values that name one model."""
    setting = "" if method == "merged" else setting
    return {"upstream": UPSTREAM, "method": method, "setting": setting}


def alignment(evidence: Evidence, adapter: str) -> PageOutput:
    """Draw the mean cosine of final features to the expert's by task and over tasks."""
    words = "mean cosine to the expert’s features (no unit)"
    return _cosines(evidence, "alignment", ("merged", adapter, "featcal"), words)


def vectors(evidence: Evidence) -> PageOutput:
    """Draw the cosine of a model's change from the base to its expert's, before and after."""
    return _cosines(evidence, "vectors", ("merged", "featcal"), "cosine of task vectors (no unit)")


def _cosines(evidence: Evidence, what: str, methods: Sequence[str], words: str) -> PageOutput:
    """Draw dots by task from top to bottom, their mean set apart below."""
    part = {"part": "backbone"} if what == "vectors" else {}
    found = {method: select(evidence.table(what), model(method) | part) for method in methods}
    if any(rows.empty for rows in found.values()):
        return shown(None, what)
    names = [*map(evidence.title, evidence.tasks), MEAN]
    with one_panel(0.42 * len(evidence.tasks) + 2.2) as (figure, axes):
        for method, rows in found.items():
            values = rows.set_index("task")["cosine"]
            dots = [*(values[task] for task in evidence.tasks), values.mean()]
            look = {"label": NAMES[method], "s": 80, "zorder": 3}
            axes.scatter(dots, range(len(names)), **look, **mark(method))
        if what == "vectors":
            axes.axvline(0, color=COLOURS["expert"], lw=1)
        axes.set_yticks(range(len(names)), names)
        axes.axhline(len(names) - 1.5, color=COLOURS["base"], lw=1)
        axes.invert_yaxis()
        axes.set_xlabel(words)
        legend(axes, 3)
        return shown(figure, what)


def images(evidence: Evidence, adapter: str) -> PageOutput:
    """Draw every sample of the shown task by its cosine with the adapter and with FeatCal."""
    keys = ({"method": method, "setting": PRINTED} for method in (adapter, "featcal"))
    pair = [select(evidence.table("similarity"), key).set_index("index") for key in keys]
    if any(rows.empty for rows in pair):
        return shown(None, "images")
    across, up = (rows["similarity"] for rows in pair)
    with one_panel(4.9) as (figure, axes):
        specks(axes, across, up[across.index], 4, edgecolor=COLOURS["featcal"], alpha=0.4)
        low, high = min(across.min(), up.min()), max(across.max(), up.max())
        axes.plot([low, high], [low, high], color=COLOURS["expert"], lw=1.2, ls="--")
        look = {"marker": "+", "s": 260, "color": "black", "lw": 2.4, "zorder": 4}
        axes.scatter(across.mean(), up.mean(), label="mean", **look)
        above = int((up[across.index] > across).sum())
        axes.set_title(f"{evidence.title(evidence.shown)}: {above} of {len(across)} above the line")
        axes.set_xlabel(f"cosine with {NAMES[adapter]} (no unit)")
        axes.set_ylabel("cosine with FeatCal (no unit)")
        axes.legend()
        return shown(figure, "images")


def gains(evidence: Evidence, adapter: str) -> PageOutput:
    """Draw gain in cosine against gain in accuracy over the adapter, a mark per task."""
    found = evidence.gains(model("featcal"), model(adapter))
    if found.empty:
        return shown(None, "gains")
    with one_panel(4.9) as (figure, axes):
        axes.axhline(0, color=COLOURS["expert"], lw=1)
        axes.axvline(0, color=COLOURS["expert"], lw=1)
        bars = {"xerr": found["cosine_noise"], "yerr": found["accuracy_noise"], "elinewidth": 0.8}
        look = {"fmt": MARKERS["featcal"], "ms": 9, "color": COLOURS["featcal"]}
        axes.errorbar(found["cosine"], found["accuracy"], ecolor="#999999", **look, **bars)
        axes.margins(x=0.18, y=0.1)
        named(axes, {evidence.title(r.task): (r.cosine, r.accuracy) for r in found.itertuples()})
        words = f"FeatCal minus {NAMES[adapter]}"
        axes.set(xlabel=f"gain in cosine, {words} (no unit)", ylabel="gain in accuracy (points)")
        return shown(figure, "gains")


def answer(*experiments: Evidence) -> PageOutput:
    """Return cosine, drift and accuracy before and after calibration, means over tasks."""
    rows = []
    for ours in experiments:
        merged = average(ours, (UPSTREAM, "merged", ""))
        for setting in settings_of(ours):
            name = model_title(ours.role, ours.suite)
            cells = [f"{name} <small>{SHORT[setting]}</small>"]
            for measure in ("cosine", "relative_drift"):
                found = drift_rows(ours, measure, setting)  # cosines end with the final features
                last = found[found["place"] == found["place"].max()]
                means = last.groupby("method")[measure].mean()
                said = f"{means['merged']:.2f} → {means['featcal']:.2f}" if len(means) > 1 else ""
                cells.append(said or "not run")
            featcal = average(ours, (UPSTREAM, "featcal", setting))
            rows.append([*cells, margin(featcal, merged)])
    head = ["Merged → FeatCal", "Cosine of final features to the expert’s"]
    head += ["Relative drift after the last block", "Accuracy, points"]
    caption = "Task arithmetic before and after calibration, means over tasks"
    return listed(head, rows, caption, "fc-long")


def against_answer(adapter: str, *experiments: Evidence) -> PageOutput:
    """Return accuracy and cosines of the merged model, with the adapter and with FeatCal."""
    rows = []
    for ours in experiments:
        models = [("merged", "")]
        models += [(m, s) for s in settings_of(ours) for m in (adapter, "featcal")]
        for method, setting in models:
            one = model(method, setting)
            found = select(ours.table("alignment"), one)
            seed = {"seed": found["seed"].iloc[0]} if len(found) else {}
            accuracy = estimate(select(ours.table("scores"), one | seed))
            moved = select(ours.table("vectors"), one | {"part": "backbone"})
            cells = [f"{accuracy.mean:.1f}" if accuracy and len(found) else "not run"]
            cells.append(f"{found['cosine'].mean():.3f}" if len(found) else "–")
            cells.append(f"{moved['cosine'].mean():.3f}" if len(moved) else "as merged")
            name = (METHODS | {"merged": UPSTREAMS[UPSTREAM]})[method]
            words = ", ".join(filter(None, (model_name(ours.role, ours.suite), SHORT[setting])))
            kind = "fc-merger" if method == "merged" else ""
            rows.append((kind, [f"{name} <small>{words}</small>", *cells]))
    head = ["", "Accuracy (%)", "Cosine of final features", "Cosine of task vectors"]
    return listed(head, rows, "Means over tasks, one seed; cosines to the expert’s")
