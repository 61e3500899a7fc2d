"""Figure 5: FeatCal's accuracy with one of λ, ρ and α varied at a time."""

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, Any

import pandas as pd

from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import hovering, legend, one_panel, shown
from reproduction.report.html import PageOutput, compact, listed
from reproduction.report.paper import REAL, model_name
from reproduction.report.tables import SETTING_LABELS, SYMBOLS, UPSTREAMS, average, settings_shown

if TYPE_CHECKING:
    import plotly.graph_objects as go

MERGERS = ("task_arithmetic", "wudi")
COLOURS = {"task_arithmetic": "#0072B2", "wudi": "#D55E00"}  # Okabe and Ito
MARKERS = {"task_arithmetic": "o", "wudi": "s"}
WORDS = {
    "ridge": "λ, ridge", "anchor_blend": "ρ, blend of merged and base", "interpolation": "α, interpolation",
}  # fmt: skip
FIGURES = {
    "ridge": "fig-sweep-ridge", "anchor_blend": "fig-sweep-blend", "interpolation": "fig-sweep-interpolation",
}  # fmt: skip


def hover(*experiments: Evidence) -> PageOutput:
    """Return the same panels as data, to be read by hovering."""
    run = [ours for ours in experiments if not ours.table("sweep").empty]
    return hovering(
        {
            name + ("-real" if ours.role == REAL else ""): _interactive(ours, parameter)
            for ours, (parameter, name) in product(run, FIGURES.items())
        }
    )


def curve(ours: Evidence, parameter: str, upstream: str, setting: str) -> pd.DataFrame:
    """Return the average over tasks by value, in rising order, with the mark of what was chosen."""
    wanted = {"parameter": parameter, "upstream": upstream, "setting": setting}
    groups = select(ours.table("sweep"), wanted).groupby("at")
    return groups.agg(value=("value", "mean"), chosen=("chosen", "max"))


def _curves(ours: Evidence, parameter: str) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield merger, setting and points of every curve that was run."""
    for upstream in MERGERS:
        for setting in settings_shown(ours.suite):
            points = curve(ours, parameter, upstream, setting)
            if not points.empty:
                yield upstream, setting, points


def answer(*experiments: Evidence) -> PageOutput:
    """Return how much each parameter matters: the range of each curve and where it is highest."""
    rows = []
    for parameter, ours in product(WORDS, experiments):
        for upstream, setting, points in _curves(ours, parameter):
            values, kept = points["value"], points.loc[points["chosen"] == 1, "value"]
            about = f"{model_name(ours.role, ours.suite)}, around the {SETTING_LABELS[setting]}"
            name = f"{SYMBOLS[parameter]}, {UPSTREAMS[upstream]} <small>{about}</small>"
            cells = [f"{values.max() - values.min():.1f}", compact(values.idxmax())]
            cells.append(f"{kept.iloc[0] - values.max():+.1f}" if len(kept) else "–")
            rows.append([name, *cells])
    caption = "Average accuracy over one sweep, points; on test samples, so nothing is chosen by it"
    head = ["Varied", "Highest − lowest", "Highest at", "At the setting − highest"]
    return listed(head, rows, caption, "fc-long", "no sweeps in the results")


def values(ours: Evidence) -> PageOutput:
    """Return the numbers behind the curves; bold: the setting that the others are varied around."""
    rows = []
    for parameter in WORDS:
        for upstream, setting, points in _curves(ours, parameter):
            cells = [f"{SYMBOLS[parameter]}, {UPSTREAMS[upstream]}, {SETTING_LABELS[setting]}"]
            for at, row in points.iterrows():
                value = f"<strong>{row.value:.1f}</strong>" if row.chosen else f"{row.value:.1f}"
                cells.append(f"{value}<small>at {compact(float(at))}</small>")
            rows.append(cells)
    name, width = model_name(ours.role, ours.suite), max(map(len, rows), default=0)
    rows = [cells + [""] * (width - len(cells)) for cells in rows]
    head = ["Varied, merger, around", *["value"] * (width - 1)]
    return listed(head, rows, f"Average top-1 accuracy (%) — {name}", "", f"no sweeps — {name}")


def panel(parameter: str, ours: Evidence) -> PageOutput:
    """Draw one parameter's curves: every merger and setting that it was varied around.

    A ring marks the chosen value; curves around other settings than the printed are hollow.
    """
    what = f"sweep of {SYMBOLS[parameter]}"
    if ours.table("sweep").empty:
        return shown(None, what)
    with one_panel(4.0) as (figure, axes):
        for upstream, setting, points in _curves(ours, parameter):
            colour, chosen = COLOURS[upstream], points[points["chosen"] == 1]
            look: dict[str, Any] = {
                "color": colour,
                "marker": MARKERS[upstream],
                "ls": "-",
                "zorder": 3,
            }
            if setting != "paper":
                look |= {"ls": "--", "markerfacecolor": "white", "zorder": 2}
            name = f"{UPSTREAMS[upstream]}, {SETTING_LABELS[setting]}"
            axes.plot(points.index, points["value"], label=name, markersize=8, lw=2, **look)
            ring = {"s": 260, "facecolors": "none", "edgecolors": colour, "lw": 1.8, "zorder": 4}
            axes.scatter(chosen.index, chosen["value"], **ring)
        for upstream, merged in _merged(ours, parameter).items():
            axes.axhline(merged, color=COLOURS[upstream], ls=(0, (1, 2)), lw=1.6, zorder=1)
        if parameter == "ridge":
            axes.set_xscale("log")
        axes.set(xlabel=f"{WORDS[parameter]} (no unit)", ylabel="average top-1 accuracy (%)")
        legend(axes, 1)
        return shown(figure, what)


def _merged(ours: Evidence, parameter: str) -> dict[str, float]:
    """Return the average accuracy of each merger that has a curve, before calibration."""
    found = {u: average(ours, (u, "merged", "")) for u, _, _ in _curves(ours, parameter)}
    return {upstream: merged.mean for upstream, merged in found.items() if merged}


def _interactive(ours: Evidence, parameter: str) -> "go.Figure":
    import plotly.graph_objects as go  # half a second, which only pages with such figures pay

    figure, tried = go.Figure(), set[float]()
    for upstream, setting, points in _curves(ours, parameter):
        tried |= set(map(float, points.index))
        main, colour = setting == "paper", COLOURS[upstream]
        mark = {"symbol": {"o": "circle", "s": "square"}[MARKERS[upstream]], "size": 8}
        mark |= {"line": {"color": colour, "width": 2}, "color": colour if main else "white"}
        said = [
            f"{SYMBOLS[parameter]} = {compact(at)}{', chosen' * bool(row.chosen)}: {row.value:.1f} %"
            for at, row in points.iterrows()
        ]
        figure.add_scatter(
            x=points.index.tolist(), y=points["value"].round(2).tolist(), mode="lines+markers",
            name=f"{UPSTREAMS[upstream]}, {SETTING_LABELS[setting]}", line={"color": colour, "dash": "solid" if main else "dash"},
            marker=mark, text=said, hoverinfo="text+name", hoverlabel={"namelength": -1},
        )  # fmt: skip
        chosen = points[points["chosen"] == 1]
        ring = {"symbol": "circle-open", "size": 17, "color": colour, "line": {"width": 1.8}}
        figure.add_scatter(
            x=chosen.index.tolist(), y=chosen["value"].round(2).tolist(), mode="markers", marker=ring | {"opacity": 1},
            showlegend=False, hoverinfo="skip",
        )  # fmt: skip
    ends = [min(tried), max(tried)] if tried else []
    for upstream, merged in _merged(ours, parameter).items():
        figure.add_scatter(
            x=ends, y=[round(merged, 2)] * len(ends), name=f"{UPSTREAMS[upstream]}, merged", mode="lines",
            line={"color": COLOURS[upstream], "dash": "dot", "width": 1.6}, text=[f"{merged:.1f} %"] * len(ends),
            hoverinfo="text+name", hoverlabel={"namelength": -1},
        )  # fmt: skip
    axis = {"type": "log"} if parameter == "ridge" else {}
    figure.update_xaxes(title=f"{WORDS[parameter]} (no unit)", **axis)
    return figure.update_yaxes(title="average top-1 accuracy (%)").update_layout(height=440)
