"""The style of all drawings, and Figure 1: features, drift per block, accuracy per task. They read
in grey and on a phone.

One figure per panel, because three side by side cannot be read at 390 pixels. The same data give
the same bytes of SVG.
"""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from reproduction.report.claims import INSIDE, main_setting
from reproduction.report.evidence import Evidence, select
from reproduction.report.html import PageOutput

WIDTH = 6.0  # inches; 390 pixels show it at about 60 %, so text must be large
INK = "#333333"
STYLE: dict[str, Any] = {
    "svg.hashsalt": "featcal", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 13, "axes.titlesize": 14,
    "axes.labelsize": 13, "legend.fontsize": 12, "legend.frameon": False, "axes.edgecolor": INK, "axes.labelcolor": INK,
    "text.color": INK, "xtick.color": INK, "ytick.color": INK, "figure.facecolor": "white", "axes.axisbelow": True,
    "hatch.linewidth": 0.8, "figure.dpi": 120, "axes.spines.top": False, "axes.spines.right": False, "grid.color": "#dddddd",
}  # fmt: skip
COLOURS = {  # Okabe and Ito
    "base": "#BBBBBB", "merged": "#D55E00", "featcal": "#0072B2", "expert": "#444444", "surgery": "#009E73",
    "prob_surgery": "#CC79A7",
}  # fmt: skip
MARKERS = {"expert": "o", "merged": "X", "featcal": "^", "surgery": "s", "prob_surgery": "D"}
PROJECTED = ("expert", "merged", "featcal")
# Told apart in grey as well: light, hatched, solid, hollow; dotted hatches would make the file ten
# times larger.
BARS: dict[str, dict[str, Any]] = {
    "base": {"color": COLOURS["base"]}, "merged": {"color": COLOURS["merged"], "hatch": "////", "edgecolor": "white"},
    "featcal": {"color": COLOURS["featcal"]}, "expert": {"color": "white", "edgecolor": COLOURS["expert"], "lw": 1.2},
}  # fmt: skip
NAMES = {
    "base": "base", "merged": "merged", "featcal": "FeatCal", "expert": "expert", "surgery": "Surgery",
    "prob_surgery": "ProbSurgery",
}  # fmt: skip
CURVES: dict[
    str, dict[str, Any]
] = {  # looks of what calibrates in plots of several methods; told apart in grey too
    method: {"color": COLOURS[method], "marker": marker, "label": NAMES[method]}
    for method, marker in (("featcal", "^"), ("surgery", "o"), ("prob_surgery", "s"))
}
CLASSES = 10  # whose means are joined in a projection; of more, the most frequent ones


@contextmanager
def drawing() -> Iterator[None]:
    """Matplotlib's settings of this report, put back afterwards."""
    with mpl.rc_context(sns.axes_style("whitegrid") | STYLE):
        yield


@contextmanager
def one_panel(height: float) -> Iterator[tuple[Figure, Axes]]:
    """A figure of one panel, so many inches high, in the style of this report."""
    with drawing():
        figure = Figure(figsize=(WIDTH, height))
        yield figure, figure.add_subplot()


def svg(figure: Figure) -> str:
    """The figure as SVG text without anything that changes from run to run."""
    with drawing(), io.StringIO() as out:
        figure.savefig(
            out,
            format="svg",
            metadata={"Date": None, "Creator": None},
            bbox_inches="tight",
            dpi="figure",
        )
        return _smaller(out.getvalue())


def _smaller(text: str) -> str:
    """The same drawing in half of the bytes: no indentation, short names, paths to hundredths of a
    point, markers to tenths.
    """

    def rounded(place: re.Match[str]) -> str:
        return re.sub(r"(\.\d\d)\d+", r"\1", " ".join(place[0].split()))

    text = re.sub(r'\b[dxy]="[^"]*"|translate\([^)]*\)', rounded, text)
    text = re.sub(r"<use [^>]*>", lambda use: re.sub(r'(\b[xy]="-?\d+\.\d)\d', r"\1", use[0]), text)
    text = re.sub(r'<g id="[a-zA-Z0-9]+_\d+"', "<g", text)  # nothing refers to these
    return re.sub(r">\s+<", "><", text.replace("DejaVuSans-", "g-"))


def features(evidence: Evidence) -> Figure | None:
    """Final features of the shown task in two dimensions: the expert's, the merged and the
    calibrated model's.
    """
    points = select(evidence.table("projection"), {"task": evidence.shown})
    if points.empty:
        return None
    cosine = mean_cosines(evidence)
    with one_panel(4.8) as (figure, axes):
        labels = {
            m: f"{NAMES[m]}, {cosine[m, evidence.shown]:.2f}"
            for m in PROJECTED
            if (m, evidence.shown) in cosine
        }
        plane(axes, points, NAMES | labels)
        axes.set(
            xlabel="first direction (arbitrary unit)", ylabel="second direction (arbitrary unit)"
        )
        axes.set_title(f"{evidence.title(evidence.shown)}: final features")
        legend = {
            "ncols": 3,
            "handletextpad": 0.2,
            "columnspacing": 1.2,
            "title": "mean cosine to the expert’s",
        }
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), **legend)
        return figure


def mean_cosines(evidence: Evidence) -> dict[tuple[str, str], float]:
    """Mean cosine of final features to the expert's at the main settings, by method and task."""
    rows = evidence.table("alignment")
    rows = rows[(rows["method"] == "merged") | (rows["setting"] == main_setting(evidence.suite))]
    return {(row.method, row.task): row.cosine for row in rows.itertuples()}


def plane(axes: Axes, points: pd.DataFrame, labels: dict[str, str]) -> None:
    """Small marks for images, large ones at the means of classes, and a line from the expert's mean
    to the other two.
    """
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
            axes.plot(
                [expert.x[label], place.x],
                [expert.y[label], place.y],
                style,
                color=COLOURS[model],
                lw=1.4,
                zorder=3,
            )
    for model in PROJECTED:
        own, look = (
            means.loc[model],
            {"marker": MARKERS[model], "color": COLOURS[model], "label": labels[model]},
        )
        axes.scatter(own.x, own.y, s=70, zorder=4, edgecolor="white", lw=0.8, **look)  # type: ignore[arg-type]


def distance(evidence: Evidence) -> Figure | None:
    """Distance to the expert's class token after every block on the shown task, as the paper draws
    it.
    """
    rows = select(drift_rows(evidence, "l2"), {"task": evidence.shown})
    if rows.empty:
        return None
    last = rows[rows["place"] == rows["place"].max()].set_index("method")["l2"]
    change = last["featcal"] / last["merged"] - 1
    with one_panel(3.4) as (figure, axes):
        _lines(axes, rows, "l2")
        words = f"{abs(change):.0%} {'lower' if change < 0 else 'higher'}".replace("%", " %")
        axes.set_title(f"{evidence.title(evidence.shown)}: after the last block {words}")
        return figure


def drift(evidence: Evidence) -> Figure | None:
    """Relative drift (all tokens) and cosine (class token) per block: mean over tasks, and range
    from task to task.
    """
    if drift_rows(evidence, "cosine").empty:
        return None
    with drawing():
        figure = Figure(figsize=(WIDTH, 6.8), layout="constrained")
        for axes, measure in zip(figure.subplots(2, 1), ("relative_drift", "cosine"), strict=True):
            _lines(axes, drift_rows(evidence, measure), measure)
        return figure


def drift_rows(evidence: Evidence, measure: str) -> pd.DataFrame:
    """Rows of merged and calibrated model at the main settings, with the place of each block; empty
    where one was not run.
    """
    rows = evidence.table("drift")
    rows = rows[(rows["method"] == "merged") | (rows["setting"] == main_setting(evidence.suite))]
    rows = rows[rows["block"] != "features"] if measure != "cosine" else rows
    rows = rows if set(rows["method"]) >= {"merged", "featcal"} else rows.iloc[:0]
    order = sorted(rows["block"].unique(), key=depth)
    return rows.assign(place=rows["block"].map(order.index), model=rows["method"].map(NAMES))


def _lines(axes: Axes, rows: pd.DataFrame, measure: str) -> None:
    """One line per model over the blocks; a band reaches from the least to the greatest task."""
    order = sorted(rows["block"].unique(), key=depth)
    style: dict[str, Any] = {
        "palette": {NAMES[m]: COLOURS[m] for m in ("merged", "featcal")},
        "style": "model",
        "dashes": False,
    }
    style |= {
        "markers": {NAMES[m]: MARKERS[m] for m in ("merged", "featcal")},
        "errorbar": ("pi", 100),
        "lw": 2,
        "markersize": 9,
    }
    sns.lineplot(rows, x="place", y=measure, hue="model", ax=axes, **style)
    axes.set_xticks(
        range(len(order)), map(block_name, order), rotation=0 if len(order) < 10 else 90
    )
    axes.set(xlabel="after block", ylabel=_LABELS[measure])
    axes.set_ylim(*((None, 1.02) if measure == "cosine" else (0, None)))
    axes.legend(title=None)


_LABELS = {
    "relative_drift": "relative drift (no unit)", "cosine": "cosine to the expert", "l2": "distance to the expert (L2)",
}  # fmt: skip


def depth(block: str) -> int:
    """By which blocks are put in forward order."""
    return {"embeddings": -1, "features": 10**6}.get(block) if block in INSIDE else int(block)  # type: ignore[return-value]


def block_name(block: str) -> str:
    """A block at an axis: 1, 2, … for 00, 01, …"""
    return {"embeddings": "input", "features": "final"}.get(block) or str(int(block) + 1)


def accuracies(evidence: Evidence, upstream: str = "task_arithmetic") -> Figure | None:
    """Accuracy per task as bars: base, merged, calibrated at the suite's main settings, expert."""
    scores, setting = evidence.table("scores"), main_setting(evidence.suite)
    sides = {
        "base": {"method": "base"}, "merged": {"upstream": upstream, "method": "merged"},
        "featcal": {"upstream": upstream, "method": "featcal", "setting": setting}, "expert": {"method": "expert"},
    }  # fmt: skip
    means = {
        name: select(scores, wanted).groupby("task")["value"].mean()
        for name, wanted in sides.items()
    }
    if means["merged"].empty or means["featcal"].empty:
        return None
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
        axes.legend(
            loc="lower center",
            bbox_to_anchor=(0.4, 1.0),
            ncols=4,
            handlelength=1.4,
            columnspacing=1.0,
        )
        return figure


PANELS = {"features": features, "distance": distance, "drift": drift, "accuracies": accuracies}


SIZE = 11.0  # of a letter, points
LETTER = 0.66  # of a letter on average, in sizes
MARK = 6.0  # half the side of a mark, points
AIR = 1.5  # between a name and other names or marks, points
REACHES = (
    0.0,
    9.0,
    18.0,
    30.0,
    45.0,
    60.0,
)  # how far from its mark a name may be, points; beyond the first, a line leads to it
LEADER = {"arrowstyle": "-", "color": "#777777", "lw": 0.7, "shrinkA": 0, "shrinkB": 5}

Box = tuple[float, float, float, float]  # left, bottom, right, top


def specks(
    axes: Axes, x: Sequence[float], y: Sequence[float], diameter: float, **look: Any
) -> None:
    """Round spots as one path of strokes without length: a vector drawing of a few bytes for each.
    diameter: points.
    """
    spots = np.repeat(np.column_stack([x, y]), 2, axis=0)
    path = Path(spots, np.tile([Path.MOVETO, Path.LINETO], len(spots) // 2))
    path.should_simplify = False  # which would drop strokes without length
    axes.add_patch(PathPatch(path, fill=False, lw=diameter, capstyle="round", **look))
    axes.autoscale_view()


def named(
    axes: Axes,
    points: Mapping[str, tuple[float, float]],
    others: Sequence[tuple[float, float]] = (),
) -> None:
    """A name beside each mark, in the nearest place that is free, or in the least covered one where
    none is.

    To be called after the marks are drawn and the margins set.   points, others: marks with a name
    and without.
    """
    axes.autoscale_view()  # places are asked for before anything is drawn
    per_pixel = 72 / axes.figure.dpi  # points are the unit of offsets and letters
    places = {name: axes.transData.transform(point) * per_pixel for name, point in points.items()}
    inside: Box = tuple(axes.transAxes.transform([(0, 0), (1, 1)]).flatten() * per_pixel)
    marks = [*places.values(), *(axes.transData.transform(point) * per_pixel for point in others)]
    taken: list[Box] = [(x - MARK, y - MARK, x + MARK, y + MARK) for x, y in marks]
    for name, (x, y) in places.items():
        boxes = [
            (reach, box)
            for reach in REACHES
            for box in around(x, y, LETTER * SIZE * len(name), reach)
        ]
        reach, box = min(
            boxes,
            key=lambda one: (
                outside(one[1], inside) + sum(covered(one[1], b) for b in taken),
                one[0],
            ),
        )
        taken.append(box)
        line: dict[str, Any] = {"arrowprops": LEADER} if reach else {}
        axes.annotate(
            name,
            points[name],
            (box[0] - x, box[1] - y),
            textcoords="offset points",
            fontsize=SIZE,
            va="bottom",
            **line,
        )


def around(x: float, y: float, width: float, reach: float = 0.0) -> list[Box]:
    """Boxes of one line of text around a mark: its four corners, then above and below, then to the
    right and left.
    """
    side, middle = MARK + 2 + reach, -width / 2
    low, high = -MARK + 1 - SIZE - reach, MARK - 1 + reach
    corners = [(left, bottom) for left in (side, -side - width) for bottom in (high, low)]
    beside = [(middle, high), (middle, low), (side, -SIZE / 2), (-side - width, -SIZE / 2)]
    return [
        (x + left, y + bottom, x + left + width, y + bottom + SIZE)
        for left, bottom in corners + beside
    ]


def outside(one: Box, frame: Box) -> float:
    """Area of a box that lies outside of the axes."""
    across = max(min(one[2], frame[2]) - max(one[0], frame[0]), 0.0)
    up = max(min(one[3], frame[3]) - max(one[1], frame[1]), 0.0)
    return (one[2] - one[0]) * (one[3] - one[1]) - across * up


def covered(one: Box, other: Box) -> float:
    """Area that two boxes share, with air around the first."""
    across = min(one[2] + AIR, other[2]) - max(one[0] - AIR, other[0])
    up = min(one[3] + AIR, other[3]) - max(one[1] - AIR, other[1])
    return max(across, 0.0) * max(up, 0.0)


if TYPE_CHECKING:
    import plotly.graph_objects as go

GRID = "#dddddd"


def hovering(figures: Mapping[str, "go.Figure"]) -> PageOutput:
    """Figures as data for the page, by the name of the static figure that each replaces; nothing to
    see in a terminal.
    """
    data = (
        f'<script type="application/json" class="fc-hover" data-for="{escape(name)}">{_json(figure)}</script>'
        for name, figure in figures.items()
    )
    return PageOutput("".join(data), text=f"{len(figures)} figures, to be read by hovering")


def _json(figure: "go.Figure") -> str:
    """The figure in the report's look; the same bytes for the same figure."""
    axis = {
        "gridcolor": GRID,
        "linecolor": INK,
        "zeroline": False,
        "automargin": True,
        "fixedrange": True,
    }
    legend = {"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0}
    look = {
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "font": {"family": "sans-serif", "size": 13, "color": INK},
    }
    figure.update_layout(template=None, legend=legend, hovermode="closest", dragmode=False, **look)
    edges = {side: 10 for side in "lrbt" if figure.layout.margin[side] is None}
    figure.update_layout(margin=edges).update_xaxes(**axis, exponentformat="power").update_yaxes(
        **axis
    )
    return figure.to_json(engine="json").replace("</", "<\\/")
