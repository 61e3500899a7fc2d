"""Figure 5, one of λ, ρ and α varied at a time, and the study on calibration or extrapolation."""

import math
from collections.abc import Iterable, Iterator
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pandas as pd

from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import figure_output, interactive, legend, one_panel, stacked
from reproduction.report.html import PageOutput, TableRow, change, compact, mean_cell, tabulate
from reproduction.report.paper import IMAGES, REAL, SECOND, VISION
from reproduction.report.statistics import estimate
from reproduction.report.tables import SHORT, SYMBOLS, UPSTREAMS, average, settings_shown

if TYPE_CHECKING:
    import plotly.graph_objects as go

MERGERS = ("task_arithmetic", "wudi")
COLOURS = {"task_arithmetic": "#0072B2", "wudi": "#D55E00"}  # Okabe and Ito
MARKERS = {"task_arithmetic": "o", "wudi": "s"}
PARAMETERS = {
    "ridge": "λ, ridge", "anchor_blend": "ρ, blend of merged and base", "interpolation": "α, interpolation",
}  # fmt: skip
HOLLOW = {"ls": "--", "markerfacecolor": "white", "zorder": 2}
MISSING = "no study of extrapolation"
ALONE = "anchor alone"
PARTS = ("residual target", "order", "joint bias", "α", "ρ", "λ")
MODELS = {VISION: "ViT-S/14", REAL: "MiniLM", SECOND: "MPNet", IMAGES: "synthetic images"}
WHOLE = (VISION, REAL, IMAGES)  # with enough scored samples to compare parts
ORDERS = {"stale": "merger’s features", "forward": "forward order", "sites": "site by site"}
ORDER_LOOKS = {"stale": ("#009E73", "s"), "forward": ("#0072B2", "^"), "sites": ("#D55E00", "o")}
WEIGHT_PARTS = {
    "nowhere": "no weight", "below": "weights, directions below λ", "above": "weights, directions above λ",
    "weights": "all weights", "everything": "weights, biases and norms",
}  # fmt: skip
BELOW = {
    "directions": "directions", "energy": "energy of the inputs", "change": "squared change of the merger",
}  # fmt: skip


def hover(*experiments: Evidence) -> PageOutput:
    """Return the same panels as data for interactive figures."""
    figures = {}
    for data, parameter in product(experiments, PARAMETERS):
        if not data.table("sweep").empty:
            name = f"fig-sweep-{parameter.removeprefix('anchor_')}"
            name += "-real" if data.role == REAL else ""
            figures[name] = _interactive(data, parameter)
    return interactive(figures)


def _curves(data: Evidence, parameter: str) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield merger, setting and points (mean by value, mark of the chosen one) of each curve."""
    for upstream, setting in product(MERGERS, settings_shown(data.suite)):
        columns = {"parameter": parameter, "upstream": upstream, "setting": setting}
        rows = select(data.table("sweep"), columns)
        if len(rows):
            groups = rows.groupby("at")
            yield upstream, setting, groups.agg(value=("value", fmean), chosen=("chosen", "max"))


def answer(*experiments: Evidence) -> PageOutput:
    """Return how much each parameter matters: the range of each curve and where it is highest."""
    rows = []
    for parameter, data in product(PARAMETERS, experiments):
        for upstream, setting, points in _curves(data, parameter):
            values, kept = points["value"], points.loc[points["chosen"] == 1, "value"]
            known = MODELS if data.suite == "mini" else {}
            model = known.get(data.role) or data.model_name
            name = f"{SYMBOLS[parameter]}, {UPSTREAMS[upstream]} <small>{model}, {SHORT[setting]}</small>"
            cells = [f"{values.max() - values.min():.1f}", compact(values.idxmax())]
            cells.append(f"{kept.iloc[0] - values.max():+z.1f}" if len(kept) else "–")
            rows.append([name, *cells])
    caption = "Average accuracy over a sweep around the printed or tuned settings, points"
    head = ["Varied", "Highest − lowest", "Highest at", "At the setting − highest"]
    return tabulate(head, rows, caption, "fc-long", "no sweeps in the results")


def values(data: Evidence) -> PageOutput:
    """Return the values of the curves; bold: the setting that the others are varied around."""
    rows = []
    for parameter in PARAMETERS:
        for upstream, setting, points in _curves(data, parameter):
            cells = [f"{SYMBOLS[parameter]}, {UPSTREAMS[upstream]}, {SHORT[setting]}"]
            for at, row in points.iterrows():
                value = f"<strong>{row.value:.1f}</strong>" if row.chosen else f"{row.value:.1f}"
                cells.append(f"{value}<small>{compact(float(at))}</small>")
            rows.append(cells)
    name, width = data.model_name, max(map(len, rows), default=0)
    rows = [cells + [""] * (width - len(cells)) for cells in rows]
    head = ["Varied, merger, around", *["value"] * (width - 1)]
    caption = f"Average top-1 accuracy (%), small: at — {name}"
    return tabulate(head, rows, caption, missing=f"no sweeps — {name}")


def panel(parameter: str, data: Evidence) -> PageOutput:
    """Draw one parameter's curves by merger and setting; a ring marks the chosen value."""
    title = f"sweep of {SYMBOLS[parameter]}"
    if data.table("sweep").empty:
        return figure_output(None, title)
    with one_panel(4.0) as (figure, axes):
        for upstream, setting, points in _curves(data, parameter):
            colour, chosen = COLOURS[upstream], points[points["chosen"] == 1]
            style: dict[str, Any] = {"color": colour, "marker": MARKERS[upstream]}
            style |= {"ls": "-", "zorder": 3} if setting == "paper" else HOLLOW
            name = f"{UPSTREAMS[upstream]}, {SHORT[setting]} settings"
            axes.plot(points.index, points["value"], label=name, markersize=8, lw=2, **style)
            ring = {"s": 260, "facecolors": "none", "edgecolors": colour, "lw": 1.8, "zorder": 4}
            axes.scatter(chosen.index, chosen["value"], **ring)
        for upstream, merged in _merged(data, parameter).items():
            axes.axhline(merged, color=COLOURS[upstream], ls=(0, (1, 2)), lw=1.6, zorder=1)
        if parameter == "ridge":
            axes.set_xscale("log")
        axes.set(xlabel=f"{PARAMETERS[parameter]} (no unit)", ylabel="average top-1 accuracy (%)")
        legend(axes, 1)
        return figure_output(figure, title)


def _merged(data: Evidence, parameter: str) -> dict[str, float]:
    """Return the average accuracy of each merger that has a curve, before calibration."""
    averages = {u: average(data, (u, "merged", "")) for u, _, _ in _curves(data, parameter)}
    return {upstream: merged.mean for upstream, merged in averages.items() if merged}


def _interactive(data: Evidence, parameter: str) -> "go.Figure":
    import plotly.graph_objects as go  # half a second, which only pages with such figures pay

    figure, tried = go.Figure(), set[float]()
    for upstream, setting, points in _curves(data, parameter):
        tried |= set(map(float, points.index))
        main, colour = setting == "paper", COLOURS[upstream]
        mark = {"symbol": {"o": "circle", "s": "square"}[MARKERS[upstream]], "size": 8}
        mark |= {"line": {"color": colour, "width": 2}, "color": colour if main else "white"}
        texts = [
            f"{SYMBOLS[parameter]} = {compact(at)}{', chosen' * bool(row.chosen)}: {row.value:.1f} %"
            for at, row in points.iterrows()
        ]
        figure.add_scatter(
            x=points.index.tolist(), y=points["value"].round(2).tolist(), mode="lines+markers",
            name=f"{UPSTREAMS[upstream]}, {SHORT[setting]} settings", line={"color": colour, "dash": "solid" if main else "dash"},
            marker=mark, text=texts, hoverinfo="text+name", hoverlabel={"namelength": -1},
        )  # fmt: skip
        chosen = points[points["chosen"] == 1]
        ring = {"symbol": "circle-open", "size": 17, "color": colour, "line": {"width": 1.8}}
        figure.add_scatter(
            x=chosen.index.tolist(), y=chosen["value"].round(2).tolist(), mode="markers",
            marker=ring | {"opacity": 1}, showlegend=False, hoverinfo="skip",
        )  # fmt: skip
    ends = [min(tried), max(tried)] if tried else []
    for upstream, merged in _merged(data, parameter).items():
        figure.add_scatter(
            x=ends, y=[round(merged, 2)] * len(ends), name=f"{UPSTREAMS[upstream]}, merged", mode="lines",
            line={"color": COLOURS[upstream], "dash": "dot", "width": 1.6}, text=[f"{merged:.1f} %"] * len(ends),
            hoverinfo="text+name", hoverlabel={"namelength": -1},
        )  # fmt: skip
    axis = {"type": "log"} if parameter == "ridge" else {}
    figure.update_xaxes(title=f"{PARAMETERS[parameter]} (no unit)", **axis)
    return figure.update_yaxes(title="average top-1 accuracy (%)").update_layout(height=440)


# calibration or extrapolation


def study_rows(data: Evidence, choice: str, variant: str = "", **settings: float) -> pd.DataFrame:
    return select(data.table("extrapolation"), {"choice": choice, "variant": variant, **settings})


def rows_by_line(data: Evidence) -> dict[str, dict[float, pd.DataFrame]]:
    """Return the rows at every ρ, by order and α; the anchor alone comes first."""
    study = data.settings("extrapolation")["study"]
    blends, by_line = study["blends"], {}
    by_line[ALONE] = {rho: study_rows(data, "anchor", anchor_blend=rho) for rho in blends}
    for order, alpha in product(study["orders"], study["interpolations"]):
        by_line[f"{ORDERS[order]}, α {alpha:g}"] = {
            rho: study_rows(data, "cell", order, interpolation=alpha, anchor_blend=rho)
            for rho in blends
        }
    return by_line


def studies(suite: str, roles: Iterable[str] = MODELS) -> dict[str, Evidence]:
    """Return the results that include the study, by the name of the model."""
    by_model = {MODELS[role]: Evidence(suite, role, "8") for role in roles}
    return {name: data for name, data in by_model.items() if data.settings("extrapolation")}


def by_blend(suite: str) -> PageOutput:
    """Draw the average score by ρ for every order and α, and of the anchor alone."""
    title = "scores by ρ"
    by_model = {name: rows_by_line(data) for name, data in studies(suite).items()}
    if not by_model:
        return figure_output(None, title)
    looks = {ORDERS[order]: look for order, look in ORDER_LOOKS.items()}
    with stacked(len(by_model), 3.6 * len(by_model) + 1.0) as (figure, panels):
        for axes, (name, model_lines) in zip(panels, by_model.items(), strict=True):
            for label, by_rho in model_lines.items():
                means = [rows["value"].mean() for rows in by_rho.values()]
                colour, marker = looks.get(label.split(",")[0], ("#777777", "x"))
                style = "--" if "α 0." in label else "-"
                axes.plot(list(by_rho), means, style, label=label, color=colour, marker=marker)
            axes.set_xscale("log", base=2)
            blends = list(dict.fromkeys(rho for by_rho in model_lines.values() for rho in by_rho))
            axes.set_xticks(blends, [f"{rho:g}" for rho in blends])
            axes.minorticks_off()
            axes.set(title=name, xlabel="ρ", ylabel="average score (%)")
        plotted = [line for axes in panels for line in axes.get_lines()]
        lines = {str(line.get_label()): line for line in plotted}
        figure.legend(lines.values(), lines, loc="outside upper center", ncols=2, fontsize="small")
        return figure_output(figure, title)


def by_order(suite: str) -> PageOutput:
    """List scores by ρ for every order and α, and the gains of ρ = 1 and of the largest ρ."""
    rows, by_model = [], {name: rows_by_line(data) for name, data in studies(suite).items()}
    lines = (by_rho for model_lines in by_model.values() for by_rho in model_lines.values())
    blends = sorted({rho for by_rho in lines for rho in by_rho})
    for name, model_lines in by_model.items():
        merged = estimate(model_lines[ALONE][1.0])
        for label, by_rho in model_lines.items():
            first, last = (estimate(by_rho[rho]) for rho in (min(by_rho), max(by_rho)))
            cells = [_score_cell(by_rho[rho]) if rho in by_rho else "–" for rho in blends]
            cells += ["–" if label == ALONE else change(first, merged), change(last, first)]
            kind = "fc-merger" if label == ALONE else ""
            rows.append((kind, [f"{label}<small>{name}</small>", *cells]))
    head = ["", *(f"ρ = {rho:g}" for rho in blends), "ρ = 1 over merged", "largest ρ over 1"]
    caption = "Average score (%) after task arithmetic; small: λ. ± two standard errors"
    return tabulate(head, rows, caption, "fc-long", MISSING)


def _score_cell(rows: pd.DataFrame) -> str:
    mean = estimate(rows)
    if mean is None:
        return "–"
    ridge = float(rows["ridge"].iloc[0])
    chosen = "by halves" if math.isnan(ridge) else compact(ridge)
    at = "" if ridge > 1e6 else f"<small>{chosen}</small>"
    return f"{mean.mean:.1f}{at}"


def spectrum(suite: str) -> PageOutput:
    """List scores with ρ on a part of the weights, below a row with the shares below λ."""
    rows: list[TableRow] = []
    for name, data in studies(suite, WHOLE).items():
        for ridge, shares in data.settings("extrapolation")["below"].items():
            by_part = {p: study_rows(data, "spectrum", p, ridge=float(ridge)) for p in WEIGHT_PARTS}
            below = (f"{label} {100 * shares[part]:.0f} %" for part, label in BELOW.items())
            small = f"<small>below λ: {', '.join(below)}</small>"
            rows.append(("fc-merger", [f"{name}, λ {compact(float(ridge))}{small}", "", ""]))
            for part_name, part_rows in by_part.items():
                baseline = None if part_name == "nowhere" else estimate(by_part["nowhere"])
                mean = estimate(part_rows)
                rows.append([WEIGHT_PARTS[part_name], mean_cell(mean), change(mean, baseline)])
    head = ["ρ = 8 acts on", "Score (%)", "Over no weight"]
    caption = (
        "ρ on a part of the weights and 1 elsewhere; forward order, α 0.3; ± two standard errors"
    )
    return tabulate(head, rows, caption, missing=MISSING)


def parts(suite: str) -> PageOutput:
    """List the gain of every part of the default if added, and its loss if removed."""
    by_model = studies(suite, WHOLE)
    rows = [[name or "start"] for name in ("", *PARTS)] if by_model else []
    head = [""]
    for name, data in by_model.items():
        head += [f"added to printed, {name}", f"removed from default, {name}"]
        blend = data.settings("extrapolation")["stream_blend"]
        default_rows = study_rows(data, "stream", anchor_blend=blend)
        for choice, start in (("alone", study_rows(data, "alone")), ("left out", default_rows)):
            rows[0].append(_score_cell(start))
            for cells, part in zip(rows[1:], PARTS, strict=True):
                cells.append(change(estimate(study_rows(data, choice, part)), estimate(start)))
    caption = "Change of the average score (points) after task arithmetic; small: λ. ± two standard errors"
    return tabulate(head, rows, caption, "fc-long", MISSING)
