"""Shares of the gap by number of tasks, drawn: a row per method and a column per merger, ours and
the paper's.
"""

from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reproduction.report.evidence import select
from reproduction.report.figures import WIDTH, drawing, hovering
from reproduction.report.html import PageOutput
from reproduction.report.page import Page
from reproduction.report.paper import IMAGES
from reproduction.report.tables import UPSTREAMS
from reproduction.report.task_counts import MERGERS, PAPER, POOLS, STUDY, TRAINED, series, shares
from reproduction.report.why_adapters import NAMES, ran, way

if TYPE_CHECKING:
    import plotly.graph_objects as go

METHODS = ("featcal", *TRAINED, "mean_shift")
MARKS: dict[str, dict[str, Any]] = {  # of Okabe and Ito; told apart in grey by marker and line
    STUDY: {"color": "#0072B2", "marker": "o"}, POOLS: {"color": "#0072B2", "marker": "o", "markerfacecolor": "white"},
    PAPER: {"color": "#444444", "marker": "X", "ls": (0, (1, 2))},
}  # fmt: skip


def panels(page: Page) -> PageOutput:
    """The shares drawn: a row per method, a column per merger."""
    return page.drawn(_panels(page), "shares of the gap by number of tasks")


def hover(page: Page) -> PageOutput:
    """The same panels, to be read by hovering: each share with its model, its number of tasks and
    its range.
    """
    ending = "" if page.place[0] == IMAGES else "-real"
    return hovering(
        {f"fig-why-adapters{ending}": _interactive(shares(page), page)} if ran(page) else {}
    )


def _panels(page: Page) -> Figure | None:
    if not ran(page):
        return None
    found = shares(page)
    with drawing():
        figure = Figure(figsize=(WIDTH, 9.6))
        grid = figure.subplots(len(METHODS), len(MERGERS), sharex=True, sharey=True, squeeze=False)
        for line, method in zip(grid, METHODS, strict=True):
            for axes, upstream in zip(line, MERGERS, strict=True):
                own = select(found, {"upstream": upstream, "method": method})
                for number, setting in enumerate([s for m, s in series(page) if m == method]):
                    _curve(axes, select(own, {"setting": setting}), "-" if number == 0 else "--")
                _points(axes, own, PAPER)
                axes.set_title(f"{NAMES[method]},\n{UPSTREAMS[upstream]}", fontsize=12)
                axes.axhline(0, color="#333333", lw=1)
        counts = sorted(set(found["tasks"]))
        for axes in grid[-1]:
            axes.set(xscale="log", xlabel="tasks")
            axes.set_xticks(counts, list(map(str, counts)))
            axes.minorticks_off()
        for axes in grid[:, 0]:
            axes.set_ylabel("share (%)")
        figure.tight_layout()
        return figure


def _interactive(found: pd.DataFrame, page: Page) -> "go.Figure":
    from plotly.subplots import (
        make_subplots,
    )  # half a second, which only pages with such figures pay

    titles = [
        f"{NAMES[method]},<br>{UPSTREAMS[upstream]}" for method in METHODS for upstream in MERGERS
    ]
    shape: dict[str, Any] = {
        "rows": len(METHODS),
        "cols": len(MERGERS),
        "subplot_titles": titles,
        "vertical_spacing": 0.06,
    }
    figure = make_subplots(**shape, shared_xaxes="all", shared_yaxes="all", horizontal_spacing=0.04)
    for row, method in enumerate(METHODS, 1):
        for column, upstream in enumerate(MERGERS, 1):
            own = select(found, {"upstream": upstream, "method": method})
            for number, setting in enumerate([s for m, s in series(page) if m == method]):
                line = select(own, {"setting": setting})
                look = {
                    "mode": "lines+markers",
                    "line": {"dash": "dash" if number else "solid", "width": 1.8},
                }
                figure.add_traces(
                    [look | one for one in _traces(line, way(method, setting))],
                    rows=row,
                    cols=column,
                )
            printed = _traces(select(own, {"source": PAPER}), f"{NAMES[method]}, the paper")
            figure.add_traces([{"mode": "markers"} | one for one in printed], rows=row, cols=column)
    counts = sorted(set(found["tasks"]))
    figure.update_xaxes(type="log", tickvals=counts, ticktext=list(map(str, counts)))
    figure.update_xaxes(title="tasks", row=len(METHODS))
    figure.update_yaxes(title="share (%)", col=1)
    return figure.update_annotations(font_size=12).update_layout(
        height=960, showlegend=False, margin_t=50
    )


def _traces(rows: pd.DataFrame, name: str) -> list[dict[str, Any]]:
    """Some shares as one line of plotly's, with what is said of each; none where there are none."""
    those = list(rows.itertuples())
    if not those:
        return []
    symbols = {STUDY: "circle", POOLS: "circle-open", PAPER: "x"}
    said = [
        f"{one.source}, {one.tasks} tasks: {one.share:.0f} %"
        + (f" (parts from {one.least:.0f} to {one.most:.0f})" if one.most > one.least else "")
        for one in those
    ]
    bars = {"array": [round(one.most - one.share, 2) for one in those], "thickness": 1, "width": 0}
    bars |= {"arrayminus": [round(one.share - one.least, 2) for one in those], "symmetric": False}
    mark = {"color": MARKS[those[0].source]["color"], "size": 8, "opacity": 1}
    trace = {
        "type": "scatter", "name": name, "error_y": bars,
        "x": [one.tasks for one in those], "y": [round(one.share, 2) for one in those],
        "marker": mark | {"symbol": [symbols[one.source] for one in those]},
        "text": said, "hoverinfo": "text+name", "hoverlabel": {"namelength": -1},
    }  # fmt: skip
    return [trace]


def _curve(axes: Axes, own: pd.DataFrame, dashes: str) -> None:
    """One setting of ours through drawn parts and larger pools; bars reach from the least part to
    the most.
    """
    axes.plot(own["tasks"], own["share"], dashes, color=MARKS[STUDY]["color"], lw=1.8)
    for source in (STUDY, POOLS):
        _points(axes, own, source)


def _points(axes: Axes, own: pd.DataFrame, source: str) -> None:
    those = select(own, {"source": source})
    if len(those):
        bars = [those["share"] - those["least"], those["most"] - those["share"]]
        look: dict[str, Any] = {
            "ls": "",
            "markersize": 7,
            "elinewidth": 1.0,
            "zorder": 3,
            **MARKS[source],
        }
        axes.errorbar(those["tasks"], those["share"], yerr=bars, **look)
