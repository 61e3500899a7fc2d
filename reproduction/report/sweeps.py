"""Figure 5: FeatCal's accuracy with one of λ, ρ and α varied at a time, around the suite's settings
and the paper's.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reproduction.report.claims import main_setting
from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import hovering, one_panel
from reproduction.report.html import PageOutput, compact, fold, note, table
from reproduction.report.page import SYMBOLS, Page
from reproduction.report.paper import IMAGES
from reproduction.report.tables import SETTING_LABELS, UPSTREAMS, average, settings_shown

if TYPE_CHECKING:
    import plotly.graph_objects as go

MERGERS = ("task_arithmetic", "wudi")
COLOURS = {"task_arithmetic": "#0072B2", "wudi": "#D55E00"}  # Okabe and Ito
MARKERS = {"task_arithmetic": "o", "wudi": "s"}
WORDS = {
    "ridge": "ridge",
    "anchor_blend": "blend of merged and base",
    "interpolation": "interpolation",
}


FIGURES = {
    "ridge": "fig-sweep-ridge",
    "anchor_blend": "fig-sweep-blend",
    "interpolation": "fig-sweep-interpolation",
}


def panel(parameter: str, page: Page) -> PageOutput:
    """One parameter's curves: both mergers, every setting that it was varied around."""
    return page.drawn(_panel(page.evidence, parameter), f"sweep of {SYMBOLS[parameter]}")


def hover(page: Page) -> PageOutput:
    """The same panels, to be read by hovering: each value of a curve with its accuracy."""
    ending = "" if page.place[0] == IMAGES else "-real"
    drawn = {
        name + ending: _interactive(page.evidence, parameter) for parameter, name in FIGURES.items()
    }
    return hovering(drawn if not page.evidence.table("sweep").empty else {})


def curve(ours: Evidence, parameter: str, upstream: str, setting: str) -> pd.DataFrame:
    """Average over tasks by value, in rising order, with the mark of what was chosen; no rows where
    not run.
    """
    wanted = {"parameter": parameter, "upstream": upstream, "setting": setting}
    return (
        select(ours.table("sweep"), wanted)
        .groupby("at")
        .agg(value=("value", "mean"), chosen=("chosen", "max"))
    )


def _panel(ours: Evidence, parameter: str) -> Figure | None:
    if ours.table("sweep").empty:
        return None
    with one_panel(4.0) as (figure, axes):
        for upstream, setting, points in _curves(ours, parameter):
            _line(axes, points, upstream, setting, setting == main_setting(ours.suite))
        for upstream, merged in _merged(ours, parameter).items():
            axes.axhline(merged, color=COLOURS[upstream], ls=(0, (1, 2)), lw=1.6, zorder=1)
        if parameter == "ridge":
            axes.set_xscale("log")
        axes.set(
            xlabel=f"{SYMBOLS[parameter]}, {WORDS[parameter]} (no unit)",
            ylabel="average top-1 accuracy (%)",
        )
        axes.legend(
            loc="lower center",
            bbox_to_anchor=(0.45, 1.0),
            ncols=1 if len(settings_shown(ours.suite)) > 1 else 2,
        )
        return figure


def _curves(ours: Evidence, parameter: str) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Merger, setting and points of every curve that was run."""
    for upstream in MERGERS:
        for setting in settings_shown(ours.suite):
            points = curve(ours, parameter, upstream, setting)
            if not points.empty:
                yield upstream, setting, points


def _merged(ours: Evidence, parameter: str) -> dict[str, float]:
    """Average accuracy of each merger before calibration, of those that have a curve."""
    found = {
        upstream: average(ours, (upstream, "merged", ""))
        for upstream, _, _ in _curves(ours, parameter)
    }
    return {upstream: merged.mean for upstream, merged in found.items() if merged}


def _interactive(ours: Evidence, parameter: str) -> "go.Figure":
    import plotly.graph_objects as go  # half a second, which only pages with such figures pay

    figure, symbol = go.Figure(), SYMBOLS[parameter]
    for upstream, setting, points in _curves(ours, parameter):
        main, colour = setting == main_setting(ours.suite), COLOURS[upstream]
        mark = {
            "symbol": {"o": "circle", "s": "square"}[MARKERS[upstream]],
            "size": 8,
            "line": {"color": colour, "width": 2},
        }
        chosen, ring = (
            points[points["chosen"] == 1],
            {"symbol": "circle-open", "size": 17, "color": colour, "opacity": 1},
        )
        said = [
            f"{symbol} = {compact(at)}{', chosen' * bool(row.chosen)}: {row.value:.1f} %"
            for at, row in points.iterrows()
        ]
        figure.add_scatter(
            x=points.index.tolist(), y=points["value"].round(2).tolist(), mode="lines+markers",
            name=f"{UPSTREAMS[upstream]}, {SETTING_LABELS[setting]}", line={"color": colour, "dash": "solid" if main else "dash"},
            marker=mark | {"color": colour if main else "white"}, text=said, hoverinfo="text+name", hoverlabel={"namelength": -1},
        )  # fmt: skip
        figure.add_scatter(
            x=chosen.index.tolist(), y=chosen["value"].round(2).tolist(), mode="markers", marker=ring | {"line": {"width": 1.8}},
            showlegend=False, hoverinfo="skip",
        )  # fmt: skip
    ends = _ends(ours, parameter)
    for upstream, merged in _merged(ours, parameter).items():
        figure.add_scatter(
            x=ends, y=[round(merged, 2)] * len(ends), name=f"{UPSTREAMS[upstream]}, merged", mode="lines",
            line={"color": COLOURS[upstream], "dash": "dot", "width": 1.6}, text=[f"{merged:.1f} %"] * len(ends),
            hoverinfo="text+name", hoverlabel={"namelength": -1},
        )  # fmt: skip
    figure.update_xaxes(
        title=f"{symbol}, {WORDS[parameter]} (no unit)",
        **({"type": "log"} if parameter == "ridge" else {}),
    )
    return figure.update_yaxes(title="average top-1 accuracy (%)").update_layout(height=440)


def _ends(ours: Evidence, parameter: str) -> list[float]:
    """The least and the largest value at which any curve was run."""
    tried = [float(at) for _, _, points in _curves(ours, parameter) for at in points.index]
    return [min(tried), max(tried)] if tried else []


def _line(axes: Axes, points: pd.DataFrame, upstream: str, setting: str, main: bool) -> None:
    """A curve with its chosen value ringed: filled and solid at the main settings, hollow and
    dashed at the others.
    """
    colour, name = COLOURS[upstream], f"{UPSTREAMS[upstream]}, {SETTING_LABELS[setting]}"
    look: dict[str, Any] = {
        "color": colour,
        "marker": MARKERS[upstream],
        "markersize": 8,
        "lw": 2,
        "label": name,
    }
    look |= (
        {"ls": "-", "zorder": 3} if main else {"ls": "--", "markerfacecolor": "white", "zorder": 2}
    )
    axes.plot(points.index, points["value"], **look)
    chosen = points[points["chosen"] == 1]
    axes.scatter(
        chosen.index, chosen["value"], s=260, facecolors="none", edgecolors=colour, lw=1.8, zorder=4
    )


def values(page: Page) -> PageOutput:
    """The numbers behind the curves, one click away; bold: what was chosen."""
    ours, parts = page.evidence, []
    if ours.table("sweep").empty:
        return PageOutput(note(f"○ not run: no sweeps in the results of the {page.label}."))
    for parameter in WORDS:
        for setting in settings_shown(page.suite):
            there = {
                upstream: points
                for upstream, at, points in _curves(ours, parameter)
                if at == setting
            }
            if there:
                parts.append(_values(there, parameter, setting, page))
    return PageOutput(fold("The numbers behind the curves", "".join(parts)))


def _values(curves: dict[str, pd.DataFrame], parameter: str, setting: str, page: Page) -> str:
    first = next(iter(curves.values()))
    head = [
        SYMBOLS[parameter],
        *(
            f"<strong>{compact(at)}</strong>" if c else compact(at)
            for at, c in first["chosen"].items()
        ),
    ]
    rows = [
        ("", [UPSTREAMS[upstream], *(f"{value:.1f}" for value in points["value"])])
        for upstream, points in curves.items()
    ]
    caption = f"Average top-1 accuracy (%) by {SYMBOLS[parameter]}, the others at the {SETTING_LABELS[setting]} — {page.label}"
    return table(head, rows, caption)


def settings(page: Page) -> PageOutput:
    """What the curves are varied around, and from how many images."""
    told = page.evidence.settings("sweep").get("study", {})
    if not told:
        return PageOutput(note("○ not run: no settings file yet."))
    names = [name for name in SYMBOLS if name != "samples"]
    rows = [
        (
            "",
            [
                SETTING_LABELS[around["setting"]],
                *(compact(around["featcal"][name]) for name in names),
                str(told["samples"]),
            ],
        )
        for around in told["around"]
    ]
    head = [
        "The curves stand around the",
        *(SYMBOLS[name] for name in names),
        SYMBOLS["samples"].replace("images", page.inputs),
    ]
    return PageOutput(table(head, rows, f"Settings — {page.label}; seed {told['seed']}"))
