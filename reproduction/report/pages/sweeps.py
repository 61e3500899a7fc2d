"""Figure 5, one of λ, ρ and α varied at a time, and the study on calibration or extrapolation: ρ by order and α, the
default's parts, and ρ on a part of the weights.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import product
from typing import TYPE_CHECKING, Any

import pandas as pd

from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import hovering, legend, one_panel, shown, stacked
from reproduction.report.html import PageOutput, TableRow, averaged, change, compact, listed
from reproduction.report.paper import IMAGES, REAL, SECOND, VISION, model_name
from reproduction.report.statistics import estimate
from reproduction.report.tables import SHORT, SYMBOLS, UPSTREAMS, average, settings_shown

if TYPE_CHECKING:
    import plotly.graph_objects as go

MERGERS = ("task_arithmetic", "wudi")
COLOURS = {"task_arithmetic": "#0072B2", "wudi": "#D55E00"}  # Okabe and Ito
MARKERS = {"task_arithmetic": "o", "wudi": "s"}
WORDS = {
    "ridge": "λ, ridge", "anchor_blend": "ρ, blend of merged and base", "interpolation": "α, interpolation",
}  # fmt: skip
HOLLOW = {"ls": "--", "markerfacecolor": "white", "zorder": 2}
MISSING = "no study of extrapolation"
ALONE = "anchor alone"
PARTS = ("residual target", "order", "joint bias", "α", "ρ", "λ")
SOURCES = {VISION: "ViT-S/14", REAL: "MiniLM", SECOND: "MPNet", IMAGES: "synthetic images"}
WHOLE = (VISION, REAL, IMAGES)  # with enough scored samples to tell parts apart
ORDERS = {"stale": "merger’s features", "forward": "forward order", "sites": "site by site"}
ORDER_LOOKS = {"stale": ("#009E73", "s"), "forward": ("#0072B2", "^"), "sites": ("#D55E00", "o")}
PLACES = {
    "nowhere": "no weight", "below": "weights, directions below λ", "above": "weights, directions above λ",
    "weights": "all weights", "everything": "weights, biases and norms",
}  # fmt: skip
BELOW = {
    "directions": "directions", "energy": "energy of the inputs", "change": "squared change of the merger",
}  # fmt: skip


def hover(*experiments: Evidence) -> PageOutput:
    """Return the same panels as data, to be read by hovering."""
    figures = {}
    for ours, parameter in product(experiments, WORDS):
        if not ours.table("sweep").empty:
            name = f"fig-sweep-{parameter.removeprefix('anchor_')}"
            name += "-real" if ours.role == REAL else ""
            figures[name] = _interactive(ours, parameter)
    return hovering(figures)


def _curves(ours: Evidence, parameter: str) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield merger, setting and points (mean by value, mark of the chosen one) of each curve run."""
    for upstream, setting in product(MERGERS, settings_shown(ours.suite)):
        wanted = {"parameter": parameter, "upstream": upstream, "setting": setting}
        own = select(ours.table("sweep"), wanted)
        if len(own):
            groups = own.groupby("at")
            yield upstream, setting, groups.agg(value=("value", "mean"), chosen=("chosen", "max"))


def answer(*experiments: Evidence) -> PageOutput:
    """Return how much each parameter matters: the range of each curve and where it is highest."""
    rows = []
    for parameter, ours in product(WORDS, experiments):
        for upstream, setting, points in _curves(ours, parameter):
            values, kept = points["value"], points.loc[points["chosen"] == 1, "value"]
            about = f"{model_name(ours.role, ours.suite)}, around the {SHORT[setting]} settings"
            name = f"{SYMBOLS[parameter]}, {UPSTREAMS[upstream]} <small>{about}</small>"
            cells = [f"{values.max() - values.min():.1f}", compact(values.idxmax())]
            cells.append(f"{kept.iloc[0] - values.max():+.1f}" if len(kept) else "–")
            rows.append([name, *cells])
    caption = "Average accuracy over one sweep, points, on test samples"
    head = ["Varied", "Highest − lowest", "Highest at", "At the setting − highest"]
    return listed(head, rows, caption, "fc-long", "no sweeps in the results")


def values(ours: Evidence) -> PageOutput:
    """Return the numbers behind the curves; bold: the setting that the others are varied around."""
    rows = []
    for parameter in WORDS:
        for upstream, setting, points in _curves(ours, parameter):
            cells = [f"{SYMBOLS[parameter]}, {UPSTREAMS[upstream]}, {SHORT[setting]}"]
            for at, row in points.iterrows():
                value = f"<strong>{row.value:.1f}</strong>" if row.chosen else f"{row.value:.1f}"
                cells.append(f"{value}<small>{compact(float(at))}</small>")
            rows.append(cells)
    name, width = model_name(ours.role, ours.suite), max(map(len, rows), default=0)
    rows = [cells + [""] * (width - len(cells)) for cells in rows]
    head = ["Varied, merger, around", *["value"] * (width - 1)]
    return listed(
        head, rows, f"Average top-1 accuracy (%), small: at — {name}", "", f"no sweeps — {name}"
    )


def panel(parameter: str, ours: Evidence) -> PageOutput:
    """Draw one parameter's curves by merger and setting; a ring marks the chosen value."""
    what = f"sweep of {SYMBOLS[parameter]}"
    if ours.table("sweep").empty:
        return shown(None, what)
    with one_panel(4.0) as (figure, axes):
        for upstream, setting, points in _curves(ours, parameter):
            colour, chosen = COLOURS[upstream], points[points["chosen"] == 1]
            look: dict[str, Any] = {"color": colour, "marker": MARKERS[upstream]}
            look |= {"ls": "-", "zorder": 3} if setting == "paper" else HOLLOW
            name = f"{UPSTREAMS[upstream]}, {SHORT[setting]} settings"
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
            name=f"{UPSTREAMS[upstream]}, {SHORT[setting]} settings", line={"color": colour, "dash": "solid" if main else "dash"},
            marker=mark, text=said, hoverinfo="text+name", hoverlabel={"namelength": -1},
        )  # fmt: skip
        chosen = points[points["chosen"] == 1]
        ring = {"symbol": "circle-open", "size": 17, "color": colour, "line": {"width": 1.8}}
        figure.add_scatter(
            x=chosen.index.tolist(), y=chosen["value"].round(2).tolist(), mode="markers",
            marker=ring | {"opacity": 1}, showlegend=False, hoverinfo="skip",
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


# calibration or extrapolation


def rows_of(ours: Evidence, choice: str, variant: str = "", **numbers: float) -> pd.DataFrame:
    """Return the scored rows of one model."""
    return select(ours.table("extrapolation"), {"choice": choice, "variant": variant, **numbers})


def lines(ours: Evidence) -> dict[str, dict[float, pd.DataFrame]]:
    """Return by order and α the rows at every ρ, those of the anchor alone first."""
    study = ours.settings("extrapolation")["study"]
    found = {ALONE: {rho: rows_of(ours, "anchor", anchor_blend=rho) for rho in study["blends"]}}
    for order, alpha in product(study["orders"], study["interpolations"]):
        found[f"{ORDERS[order]}, α {alpha:g}"] = {
            rho: rows_of(ours, "cell", order, interpolation=alpha, anchor_blend=rho)
            for rho in study["blends"]
        }
    return found


def studies(suite: str, roles: Iterable[str] = SOURCES) -> dict[str, Evidence]:
    """Return the results that have the study, by the name of the model."""
    found = {SOURCES[role]: Evidence(suite, role, "8") for role in roles}
    return {name: ours for name, ours in found.items() if ours.settings("extrapolation")}


def by_blend(suite: str) -> PageOutput:
    """Draw the average score by ρ for every order and α, and of the anchor alone."""
    what, known = "scores by ρ", lines_of(suite)
    if not known:
        return shown(None, what)
    looks = {ORDERS[order]: look for order, look in ORDER_LOOKS.items()}
    with stacked(len(known), 3.6 * len(known) + 1.0) as (figure, spots):
        for axes, (name, own) in zip(spots, known.items(), strict=True):
            for words, by_rho in own.items():
                means = [rows["value"].mean() for rows in by_rho.values()]
                colour, marker = looks.get(words.split(",")[0], ("#777777", "x"))
                style = "--" if "α 0." in words else "-"
                axes.plot(list(by_rho), means, style, label=words, color=colour, marker=marker)
            axes.set_xscale("log", base=2)
            blends = list(dict.fromkeys(rho for by_rho in own.values() for rho in by_rho))
            axes.set_xticks(blends, [f"{rho:g}" for rho in blends])
            axes.minorticks_off()
            axes.set(title=name, xlabel="ρ", ylabel="average score (%)")
        drawn = [line for axes in spots for line in axes.get_lines()]
        once = {str(line.get_label()): line for line in drawn}
        figure.legend(once.values(), once, loc="outside upper center", ncols=2, fontsize="small")
        return shown(figure, what)


def by_order(suite: str) -> PageOutput:
    """List scores by ρ for every order and α, and what ρ = 1 and the last ρ gain."""
    rows, known = [], lines_of(suite)
    blends = sorted({rho for own in known.values() for line in own.values() for rho in line})
    for name, own in known.items():
        merged = estimate(own[ALONE][1.0])
        for words, by_rho in own.items():
            first, last = (estimate(by_rho[rho]) for rho in (min(by_rho), max(by_rho)))
            cells = [_scored(by_rho[rho]) if rho in by_rho else "–" for rho in blends]
            cells += ["–" if words == ALONE else change(first, merged), change(last, first)]
            kind = "fc-merger" if words == ALONE else ""
            rows.append((kind, [f"{words}<small>{name}</small>", *cells]))
    head = ["", *(f"ρ = {rho:g}" for rho in blends), "ρ = 1 over merged", "largest ρ over 1"]
    caption = "Average score (%) after task arithmetic; small: λ. ± two standard errors"
    return listed(head, rows, caption, "fc-long", MISSING)


def lines_of(suite: str) -> dict[str, dict[str, dict[float, pd.DataFrame]]]:
    """Return the rows of every model that has some, by name, line and ρ."""
    return {name: lines(ours) for name, ours in studies(suite).items()}


def _scored(rows: pd.DataFrame) -> str:
    one = estimate(rows)
    if one is None:
        return "–"
    ridge = float(rows["ridge"].iloc[0])
    chosen = "by halves" if math.isnan(ridge) else compact(ridge)
    at = "" if ridge > 1e6 else f"<small>{chosen}</small>"
    return f"{one.mean:.1f}{at}"


def spectrum(suite: str) -> PageOutput:
    """List scores with ρ on a part of the weights; a row above them says how much lies below λ."""
    rows: list[TableRow] = []
    for name, ours in studies(suite, WHOLE).items():
        for ridge, shares in ours.settings("extrapolation")["below"].items():
            found = {p: rows_of(ours, "spectrum", p, ridge=float(ridge)) for p in PLACES}
            below = (f"{words} {100 * shares[part]:.0f} %" for part, words in BELOW.items())
            small = f"<small>below λ: {', '.join(below)}</small>"
            rows.append(("fc-merger", [f"{name}, λ {compact(float(ridge))}{small}", "", ""]))
            for place, own in found.items():
                start = None if place == "nowhere" else estimate(found["nowhere"])
                one = estimate(own)
                rows.append([PLACES[place], averaged(one), change(one, start)])
    head = ["ρ = 8 acts on", "Score (%)", "Over no weight"]
    caption = (
        "ρ on a part of the weights and 1 elsewhere; forward order, α 0.3; ± two standard errors"
    )
    return listed(head, rows, caption, missing=MISSING)


def parts(suite: str) -> PageOutput:
    """List what every part of the default's settings adds to the paper's, and costs when left out."""
    found = studies(suite, WHOLE)
    rows = [[name or "start"] for name in ("", *PARTS)] if found else []
    head = [""]
    for name, ours in found.items():
        head += [f"added to printed, {name}", f"removed from default, {name}"]
        blend = ours.settings("extrapolation")["stream_blend"]
        whole = rows_of(ours, "stream", anchor_blend=blend)
        for choice, first in (("alone", rows_of(ours, "alone")), ("left out", whole)):
            rows[0].append(_scored(first))
            for cells, part in zip(rows[1:], PARTS, strict=True):
                cells.append(change(estimate(rows_of(ours, choice, part)), estimate(first)))
    caption = "Change of the average score (points) after task arithmetic; small: λ. ± two standard errors"
    return listed(head, rows, caption, "fc-long", MISSING)
