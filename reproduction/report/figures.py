"""Style of all figures: readable in grey and on a phone, the same bytes for the same data."""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from reproduction.report import tables
from reproduction.report.html import PageOutput, note

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
# distinct in grey too: light, hatched, solid, hollow; dotted hatches make a file ten times larger
BARS: dict[str, dict[str, Any]] = {
    "base": {"color": COLOURS["base"]}, "merged": {"color": COLOURS["merged"], "hatch": "////", "edgecolor": "white"},
    "featcal": {"color": COLOURS["featcal"]}, "expert": {"color": "white", "edgecolor": COLOURS["expert"], "lw": 1.2},
}  # fmt: skip
NAMES = {"base": "base", "merged": "merged", "expert": "expert"} | tables.NAMES
# styles of calibration methods in plots of several methods; distinct in grey too
CURVES: dict[str, dict[str, Any]] = {
    method: {"color": COLOURS[method], "marker": marker, "label": NAMES[method]}
    for method, marker in (("featcal", "^"), ("surgery", "o"), ("prob_surgery", "s"))
}
DASHES = {"featcal": "-", "surgery": "--", "prob_surgery": "-."}


@contextmanager
def drawing() -> Iterator[None]:
    """Use Matplotlib's settings of this report, and restore them afterwards."""
    import seaborn as sns  # a second, for pages that draw

    with mpl.rc_context(sns.axes_style("whitegrid") | STYLE):
        yield


@contextmanager
def one_panel(height: float) -> Iterator[tuple[Figure, Axes]]:
    """Yield a figure of one panel in the style of this report. height: in inches."""
    with drawing():
        figure = Figure(figsize=(WIDTH, height))
        yield figure, figure.add_subplot()


@contextmanager
def stacked(panels: int, height: float, **shape: Any) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a figure of panels below each other in the same style. height: of all, in inches."""
    with drawing():
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure, list(figure.subplots(panels, squeeze=False, **shape)[:, 0])


def legend(axes: Axes, columns: int, below: bool = False, **options: Any) -> None:
    """Put the legend above the axes, or below them."""
    position = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
    if not below:
        position = {"loc": "lower center", "bbox_to_anchor": (0.4, 1.0)}
    axes.legend(ncols=columns, handletextpad=0.4, columnspacing=1.1, **position, **options)


def svg(figure: Figure) -> str:
    """Return the figure as SVG, the same from run to run, without indentation and spare digits."""
    with drawing(), io.StringIO() as out:
        same = {"metadata": {"Date": None, "Creator": None}, "dpi": "figure"}
        figure.savefig(out, format="svg", bbox_inches="tight", **same)
        text = out.getvalue()

    def rounded(match: re.Match[str]) -> str:
        return re.sub(r"(\.\d\d)\d+", r"\1", " ".join(match[0].split()))

    text = re.sub(r'\b[dxy]="[^"]*"|translate\([^)]*\)', rounded, text)
    text = re.sub(r"<use [^>]*>", lambda use: re.sub(r'(\b[xy]="-?\d+\.\d)\d', r"\1", use[0]), text)
    text = re.sub(r'<g id="[a-zA-Z0-9]+_\d+"', "<g", text)  # nothing refers to these
    return re.sub(r">\s+<", "><", text.replace("DejaVuSans-", "g-"))


def block_order(block: str) -> int:
    """Return the key that puts blocks in forward order."""
    return {"embeddings": -1, "features": 10**6}.get(block) or int(block)


def block_name(block: str) -> str:
    """Return the name of a block at an axis: 1, 2, … for 00, 01, …"""
    return {"embeddings": "input", "features": "final"}.get(block) or str(int(block) + 1)


Box = tuple[float, float, float, float]  # left, bottom, right, top; points
SIZE = 11.0  # of a letter, points
LETTER = 0.66  # of a letter on average, in sizes
MARK = 6.0  # half the side of a mark, points
AIR = 1.5  # between a name and other names or marks, points
# distances of a label from its mark to try, points; beyond the first, a line leads to it
REACHES = (0.0, 9.0, 18.0, 30.0, 45.0, 60.0)
LEADER = {"arrowstyle": "-", "color": "#777777", "lw": 0.7, "shrinkA": 0, "shrinkB": 5}


def draw_dots(
    axes: Axes, x: Sequence[float], y: Sequence[float], diameter: float, **look: Any
) -> None:
    """Draw dots as one path of zero-length strokes, a few bytes each."""
    spots = np.repeat(np.column_stack([x, y]), 2, axis=0)
    path = Path(spots, np.tile([Path.MOVETO, Path.LINETO], len(spots) // 2))
    path.should_simplify = False  # which would drop strokes without length
    axes.add_patch(PathPatch(path, fill=False, lw=diameter, capstyle="round", **look))
    axes.autoscale_view()


def label_marks(
    axes: Axes,
    points: Mapping[str, tuple[float, float]],
    others: Sequence[tuple[float, float]] = (),
) -> None:
    """Write a label next to each mark, at the nearest free position, once everything is drawn."""
    axes.autoscale_view()  # positions are needed before anything is drawn
    per_pixel = 72 / axes.figure.dpi  # points are the unit of offsets and letters
    to_pixels = axes.transData.transform
    corners = axes.transAxes.transform([(0, 0), (1, 1)]) * per_pixel
    inside: Box = tuple(corners.flatten().tolist())
    marks = [(to_pixels(p) * per_pixel).tolist() for p in (*points.values(), *others)]
    taken: list[Box] = [(x - MARK, y - MARK, x + MARK, y + MARK) for x, y in marks]
    for (x, y), (name, point) in zip(marks, points.items(), strict=False):
        width = LETTER * SIZE * len(name)
        boxes = [(reach, box) for reach in REACHES for box in label_boxes(x, y, width, reach)]

        def cost(option: tuple[float, Box]) -> tuple[float, float]:
            reach, box = option
            left, bottom, right, top = box
            outside = overlap(box, box) - overlap(box, inside)
            padded = (left - AIR, bottom, right + AIR, top)
            return outside + sum(overlap(padded, other) for other in taken), reach

        reach, box = min(boxes, key=cost)
        taken.append(box)
        line: dict[str, Any] = {"arrowprops": LEADER} if reach else {}
        look = {"textcoords": "offset points", "fontsize": SIZE, "va": "bottom"}
        axes.annotate(name, point, (box[0] - x, box[1] - y), **look, **line)


def label_boxes(x: float, y: float, width: float, reach: float = 0.0) -> list[Box]:
    """Return boxes of one line of text around a mark: corners, above, below, right and left."""
    side, middle = MARK + 2 + reach, -width / 2
    low, high = -MARK + 1 - SIZE - reach, MARK - 1 + reach
    corners = [(left, bottom) for left in (side, -side - width) for bottom in (high, low)]
    edges = [(middle, high), (middle, low), (side, -SIZE / 2), (-side - width, -SIZE / 2)]
    offsets = ((x + left, y + bottom) for left, bottom in corners + edges)
    return [(left, bottom, left + width, bottom + SIZE) for left, bottom in offsets]


def overlap(box: Box, other: Box) -> float:
    """Return the area of the overlap of two boxes."""
    width = min(box[2], other[2]) - max(box[0], other[0])
    height = min(box[3], other[3]) - max(box[1], other[1])
    return width * height if width > 0 and height > 0 else 0.0


if TYPE_CHECKING:
    import plotly.graph_objects as go


def interactive(figures: Mapping[str, "go.Figure"]) -> PageOutput:
    """Return figures as data for the page, each with the name of the static figure it replaces."""
    tag = '<script type="application/json" class="fc-hover" data-for="{}">{}</script>'
    data = (tag.format(escape(name), _json(figure)) for name, figure in figures.items())
    return PageOutput("".join(data), text=f"{len(figures)} figures, to be read by hovering")


def _json(figure: "go.Figure") -> str:
    """Return the figure in the report's look; the same bytes for the same figure."""
    axis = {"gridcolor": "#dddddd", "linecolor": INK, "zeroline": False, "automargin": True}
    legend = {"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0}
    font = {"family": "sans-serif", "size": 13, "color": INK}
    look = {"paper_bgcolor": "white", "plot_bgcolor": "white", "font": font}
    figure.update_layout(template=None, legend=legend, hovermode="closest", dragmode=False, **look)
    edges = {side: 10 for side in "lrbt" if figure.layout.margin[side] is None}
    figure.update_layout(margin=edges)
    figure.update_xaxes(**axis, fixedrange=True, exponentformat="power")
    figure.update_yaxes(**axis, fixedrange=True)
    return figure.to_json(engine="json").replace("</", "<\\/")


def figure_output(figure: Figure | None, name: str) -> PageOutput:
    """Return a figure as SVG, or a note that nothing was run."""
    if figure is None:
        return PageOutput(note(f"○ not run: no {name} in the results."))
    return PageOutput(picture={"image/svg+xml": svg(figure)}, text=name)
