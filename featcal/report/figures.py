"""Figure 1 and its relatives: features, drift per block, accuracy per task. Drawn so that they read in grey and on a phone.

One figure per panel, because three side by side cannot be read at 390 pixels. The same data give the same bytes of SVG.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from featcal.report.claims import INSIDE, main_setting
from featcal.report.evidence import Evidence, select

WIDTH = 6.0  # inches; 390 pixels show it at about 60 %, so text must be large
INK = "#333333"
STYLE: dict[str, Any] = {
    "svg.hashsalt": "featcal", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 13, "axes.titlesize": 14,
    "axes.labelsize": 13, "legend.fontsize": 12, "legend.frameon": False, "axes.edgecolor": INK, "axes.labelcolor": INK,
    "text.color": INK, "xtick.color": INK, "ytick.color": INK, "figure.facecolor": "white", "axes.axisbelow": True,
    "hatch.linewidth": 0.8, "axes.spines.top": False, "axes.spines.right": False, "grid.color": "#dddddd",
}  # fmt: skip
COLOURS = {"base": "#BBBBBB", "merged": "#D55E00", "featcal": "#0072B2", "expert": "#444444"}  # Okabe and Ito
MARKERS = {"expert": "o", "merged": "X", "featcal": "^"}
# Told apart in grey as well: light, hatched, solid, hollow; dotted hatches would make the file ten times larger.
BARS: dict[str, dict[str, Any]] = {
    "base": {"color": COLOURS["base"]}, "merged": {"color": COLOURS["merged"], "hatch": "////", "edgecolor": "white"},
    "featcal": {"color": COLOURS["featcal"]}, "expert": {"color": "white", "edgecolor": COLOURS["expert"], "lw": 1.2},
}  # fmt: skip
NAMES = {"base": "base", "merged": "merged", "featcal": "FeatCal", "expert": "expert"}


@contextmanager
def drawing() -> Iterator[None]:
    """Matplotlib's settings of this report, put back afterwards."""
    with mpl.rc_context(sns.axes_style("whitegrid") | STYLE):
        yield


def svg(figure: Figure) -> str:
    """The figure as SVG text without anything that changes from run to run."""
    with drawing(), io.StringIO() as out:
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight", dpi=120)
        return _smaller(out.getvalue())


def _smaller(text: str) -> str:
    """The same drawing in about half of the bytes: no indentation, short names, paths and places to a hundredth of a point."""

    def rounded(place: re.Match[str]) -> str:
        return re.sub(r"(\.\d\d)\d+", r"\1", " ".join(place[0].split()))

    text = re.sub(r'\b[dxy]="[^"]*"|translate\([^)]*\)', rounded, text)
    text = re.sub(r'<g id="[a-zA-Z0-9]+_\d+"', "<g", text)  # nothing refers to these
    return re.sub(r">\s+<", "><", text.replace("DejaVuSans-", "g-"))


def features(evidence: Evidence) -> Figure | None:
    """Final features of one task in two dimensions: experts', merged and calibrated model's, joined at their class means."""
    points = evidence.table("projection")
    if points.empty:
        return None
    with drawing():
        figure = Figure(figsize=(WIDTH, 4.8))
        axes = figure.add_subplot()
        for model, marker in MARKERS.items():
            rows = points[points["model"] == model]
            axes.scatter(rows["x"], rows["y"], s=14, marker=marker, color=COLOURS[model], alpha=0.35, lw=0, rasterized=True)
        _join_class_means(axes, points)
        axes.set(xlabel="first direction (arbitrary unit)", ylabel="second direction (arbitrary unit)")
        axes.set_title(f"Final features, {evidence.title(points['task'].iloc[0])}")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, handletextpad=0.2, columnspacing=1.2)
        return figure


def _join_class_means(axes: Axes, points: pd.DataFrame) -> None:
    """Large markers at each class's mean, and a line from the expert's mean to the other two."""
    means = points.groupby(["model", "label"])[["x", "y"]].mean()
    expert = means.loc["expert"]
    for model, style in (("merged", ":"), ("featcal", "-")):
        for label, place in means.loc[model].iterrows():
            axes.plot([expert.x[label], place.x], [expert.y[label], place.y], style, color=COLOURS[model], lw=1.4, zorder=3)
    for model, marker in MARKERS.items():
        own = means.loc[model]
        look: dict[str, Any] = {"marker": marker, "color": COLOURS[model], "edgecolor": "white", "lw": 0.8}
        axes.scatter(own.x, own.y, s=70, zorder=4, label=NAMES[model], **look)


def drift(evidence: Evidence, measure: str = "relative_drift") -> Figure | None:
    """A measure of drift per block, merged against calibrated at the main settings: mean over tasks, and range from task to task.

    Args: measure: relative_drift (all tokens), or cosine or l2 (class token).
    """
    rows = evidence.table("drift")
    rows = rows[(rows["method"] == "merged") | (rows["setting"] == main_setting(evidence.suite))]
    rows = rows[rows["block"] != "features"] if measure != "cosine" else rows
    if rows.empty or not set(rows["method"]) >= {"merged", "featcal"}:
        return None
    order = sorted(rows["block"].unique(), key=_depth)
    rows = rows.assign(place=rows["block"].map(order.index), model=rows["method"].map(NAMES))
    palette = {NAMES[m]: COLOURS[m] for m in ("merged", "featcal")}
    with drawing():
        figure = Figure(figsize=(WIDTH, 3.6))
        axes = figure.add_subplot()
        style = {"style": "model", "markers": {NAMES[m]: MARKERS[m] for m in ("merged", "featcal")}, "dashes": False}
        sns.lineplot(
            rows, x="place", y=measure, hue="model", palette=palette, errorbar=("pi", 100), lw=2, markersize=9, ax=axes, **style
        )
        axes.set_xticks(range(len(order)), [_place(block) for block in order], rotation=0 if len(order) < 10 else 90)
        axes.set(xlabel="after block", ylabel=_LABELS[measure])
        axes.set_ylim(*((None, 1.02) if measure == "cosine" else (0, None)))
        axes.legend(title=None)
        return figure


_LABELS = {
    "relative_drift": "relative drift (no unit)", "cosine": "cosine to the expert", "l2": "distance to the expert (L2)",
}  # fmt: skip


def _depth(block: str) -> int:
    return {"embeddings": -1, "features": 10**6}.get(block) if block in INSIDE else int(block)  # type: ignore[return-value]


def _place(block: str) -> str:
    return {"embeddings": "input", "features": "final"}.get(block) or str(int(block) + 1)


def accuracies(evidence: Evidence, upstream: str = "task_arithmetic") -> Figure | None:
    """Accuracy per task as bars: base, merged, calibrated at the suite's main settings, expert."""
    scores, setting = evidence.table("scores"), main_setting(evidence.suite)
    sides = {
        "base": {"method": "base"}, "merged": {"upstream": upstream, "method": "merged"},
        "featcal": {"upstream": upstream, "method": "featcal", "setting": setting}, "expert": {"method": "expert"},
    }  # fmt: skip
    means = {name: select(scores, wanted).groupby("task")["value"].mean() for name, wanted in sides.items()}
    if means["merged"].empty or means["featcal"].empty:
        return None
    tasks = evidence.tasks
    with drawing():
        figure = Figure(figsize=(WIDTH, 0.75 * len(tasks) + 1.4))
        axes = figure.add_subplot()
        for i, (name, values) in enumerate(means.items()):
            places = [t + (i - 1.5) * 0.2 for t in range(len(tasks))]
            lengths = [values.get(task, 0.0) for task in tasks]
            axes.barh(places, lengths, height=0.18, label=NAMES[name], **({"lw": 0.4} | BARS[name]))
        axes.set_yticks(range(len(tasks)), [evidence.title(task) for task in tasks])
        axes.invert_yaxis()
        axes.set(xlabel="top-1 accuracy (%)", xlim=(0, 100))
        axes.grid(axis="y", visible=False)
        axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=4, handlelength=1.4, columnspacing=1.0)
        return figure


PANELS = {
    "features": features,
    "drift": drift,
    "cosine": lambda evidence: drift(evidence, "cosine"),
    "accuracies": accuracies,
}
