"""Build the theory page: every numbered statement of the paper with its worst case, and plots."""

from collections.abc import Callable
from html import escape
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from reproduction.report.claims import claims, studied_setting
from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import (
    COLOURS,
    INK,
    MARKERS,
    NAMES,
    block_name,
    block_order,
    figure_output,
    stacked,
)
from reproduction.report.html import PageOutput, chip, tabulate
from reproduction.report.page import verdict_table
from reproduction.report.paper import IMAGES, REAL, packaged
from reproduction.report.verdicts import judged

MODELS = ("merged", "featcal")
HATCHED: dict[str, Any] = {"hatch": "////", "edgecolor": "white", "lw": 0.4}
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "from_upstream": ("passed on by earlier blocks", {"color": "#BBBBBB"}),
    "from_mismatch": ("added by this block", {"color": "#D55E00", **HATCHED}),
}
LOSS_BOUNDS = {
    "proposition_7": ("Prop. 7: gradient × score change", "o"), "corollary_2": ("Cor. 2: constants × final drift", "^"),
}  # fmt: skip
SCORE_BOUNDS = {
    "proposition_3": ("Prop. 3: along the segment", "o"), "proposition_6": ("Prop. 6: every direction", "^"),
}  # fmt: skip
CLOUD: dict[str, Any] = {"ls": "none", "markersize": 4.5, "mew": 0, "alpha": 0.6}
NODES = {
    "recursion_digits": ("one block (Eq. 4)", "o", "-"), "unrolled_digits": ("all blocks (Eq. 5)", "s", "--"),
    "digits_by_nodes": ("loss (Eq. 41)", "^", ":"),
}  # fmt: skip
FITS = {"on_source": ("as solved", "--"), "deployed": ("as deployed", "-")}


def theory_rows(suite: str, role: str, file: str = "theory") -> pd.DataFrame:
    """Return the study's rows; of the calibrated model only at the suite's main setting."""
    table = Evidence(suite, role, "8").table(file)
    return table[table["setting"].isin(["", studied_setting(suite)])]


def checks(suite: str) -> PageOutput:
    """List every statement with its worst case, how tight it is, and the verdict, by source."""
    chosen, body = [claim for claim in claims() if claim.location == "theory"], []
    printed = {  # words at the printed settings
        (source.key, verdict.claim.id): verdict.word
        for source, column in judged(suite, chosen).items()
        for verdict, *_ in column
        if verdict
    }
    for name, facts in packaged("statements.yaml").items():
        cells = [f"{facts['name']}<small>{facts['section']}</small>"]
        cells += [escape(facts["says"]), escape(facts["checked"])]
        for role, source in ((REAL, "real_encoder"), (IMAGES, suite)):
            statement_rows = select(theory_rows(suite, role), {"statement": name})
            worst = (worst_case(statement_rows, method, facts["quantity"]) for method in MODELS)
            word = printed.get((source, facts["claim"]), "not run")
            cells.append(f"{chip(word)}<small>{' · '.join(worst)}</small>")
        body.append(cells)
    head = ["Statement", "In plain words", "Checked on", "MiniLM", "Synthetic images"]
    caption = "The numbered statements. Small: worst case of the merged · of the calibrated model"
    return tabulate(head, body, caption, "fc-words")


def conditions(suite: str) -> PageOutput:
    """List how often the conditions of the statements are met, in percent, mean over tasks."""
    lines = []
    for name, facts in packaged("statements.yaml").items():
        for quantity, method in facts.get("met", []):
            label = f"{quantity.replace('_', ' ')}<small>{facts['name']}, {NAMES[method]}</small>"
            columns = {"statement": name, "quantity": quantity, "method": method, "block": ""}
            values = (select(theory_rows(suite, role), columns)["value"] for role in (REAL, IMAGES))
            lines.append([label, *(f"{v.mean():.1f}" if len(v) else "–" for v in values)])
    head = ["Quantity (%)", "MiniLM", "Synthetic images"]
    return tabulate(head, lines, "What the statements need, and how often it is met")


def verdicts(suite: str) -> PageOutput:
    """List the paper's conclusions from its statements, with verdicts."""
    stated = {facts["claim"] for facts in packaged("statements.yaml").values()}
    chosen = [c for c in claims() if c.location == "theory" and c.id not in stated]
    caption = "What the paper concludes from them"
    return PageOutput(verdict_table(chosen, judged(suite, chosen), caption))


def worst_case(statement_rows: pd.DataFrame, method: str, quantity: str) -> str:
    """Return the digits of an equation, or the room and tightness of an inequality."""
    overall = statement_rows[(statement_rows["method"] == method) & (statement_rows["block"] == "")]
    worst = overall[(overall["quantity"] == quantity) & (overall["task"] == "")]
    if worst.empty:
        return "–"
    value = float(worst["value"].iloc[0])
    if quantity == "digits":
        return f"{value:.1f} digits"
    tight = overall[overall["quantity"] == "tightness"]["value"]
    return f"{value:+,.1f} %" + (f" (tight {tight.mean():.2g} %)" if len(tight) else "")


def figure(panel: str, role: str, suite: str) -> PageOutput:
    """Draw one figure of the page, or note that it was not run."""
    lines, points = theory_rows(suite, role), theory_rows(suite, role, "theory_points")
    if lines.empty or points.empty:
        return figure_output(None, panel)
    draw, panels, height = PANELS[panel]
    with stacked(panels, height * panels) as (figure, axes):
        draw(axes, lines, points)
        return figure_output(figure, panel)


def by_block(rows: pd.DataFrame, method: str, quantity: str, statement: str) -> pd.Series:
    """Return means over tasks, by block in forward order."""
    rows = select(rows, {"method": method, "quantity": quantity, "statement": statement})
    return rows[rows["block"] != ""].groupby("block", sort=True)["value"].mean()


def block_ticks(axes: Axes, blocks: Any) -> list[int]:
    """Set ticks 1, 2, … for blocks 00, 01, …"""
    axes.set_xticks(range(len(blocks)), map(block_name, blocks))
    axes.grid(axis="x", visible=False)
    return list(range(len(blocks)))


def pair_of_bars(axes: Axes, values: pd.Series, index: int, **options: Any) -> None:
    """Draw the first or second of two bars at every block."""
    positions = [tick + (index - 0.5) * 0.38 for tick in block_ticks(axes, values.index)]
    axes.bar(positions, values, width=0.36, **options)


def decomposition(axes: list[Axes], rows: pd.DataFrame, points: pd.DataFrame) -> None:
    """Draw drift after every block, stacked from the parts of Proposition 1."""
    for ax, method in zip(axes, MODELS, strict=True):
        base = 0.0
        for quantity, (name, options) in PARTS.items():
            values = by_block(rows, method, quantity, "proposition_1")
            positions = block_ticks(ax, values.index)
            ax.bar(positions, values, bottom=base, width=0.7, label=name, **options)
            base = values.to_numpy() + base
        ax.set_title(f"{NAMES[method]} model" if method == "merged" else NAMES[method])
        ax.set(ylabel="drift (% of the\nexpert's features)")
    axes[1].sharey(axes[0])
    axes[1].set_xlabel("after block")
    entries = axes[0].get_legend_handles_labels()
    axes[0].figure.legend(*entries, loc="outside lower center", ncols=2)


def propagation(axes: list[Axes], rows: pd.DataFrame, points: pd.DataFrame) -> None:
    """Draw where final drift comes from, and how fast the quadrature converges."""
    origin, nodes = axes
    for i, method in enumerate(MODELS):
        share = by_block(rows, method, "share_of_final", "proposition_2")
        share = share.loc[sorted(share.index, key=block_order)]
        options = HATCHED if method == "merged" else {}
        pair_of_bars(origin, share, i, color=COLOURS[method], label=NAMES[method], **options)
    origin.axhline(0, color=INK, lw=0.8)
    origin.set(xlabel="block whose mismatch it was", ylabel="share of final drift (%)")
    origin.legend()
    for quantity, (name, marker, style) in NODES.items():
        digits = select(rows, {"method": "merged", "quantity": quantity})
        worst = 10.0 ** -digits[digits["task"] != ""].groupby("nodes")["value"].min()
        options = {"marker": marker, "label": name, "color": INK, "markersize": 7}
        nodes.plot(worst.index, worst, style, **options)
    nodes.set_xscale("log", base=2)
    nodes.set_yscale("log")
    ticks = sorted(set(rows["nodes"].dropna()))
    nodes.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
    nodes.minorticks_off()
    nodes.set(xlabel="quadrature nodes", ylabel="largest relative error")
    nodes.legend(loc="lower left")


def bounds(axes: list[Axes], rows: pd.DataFrame, points: pd.DataFrame) -> None:
    """Draw three bounds against the actual changes."""
    growth, scores, losses = axes
    drifts = select(points, {"statement": "proposition_5"})
    for method in MODELS:
        cloud = select(drifts, {"method": method})
        options = {"marker": MARKERS[method], "color": COLOURS[method], "label": NAMES[method]}
        growth.plot(cloud["actual"], cloud["bound"], **CLOUD, **options)
    actual = drifts["actual"]
    ends = [min(actual.min(), 1.0) - 0.05, actual.quantile(0.99) + 0.05]
    growth.plot(ends, ends, color=INK, lw=1)
    growth.axhline(1, color=INK, lw=1, ls=":")
    growth.set(xlim=ends, xlabel="drift after a block / before it", ylabel="at least, by Prop. 5")
    growth.legend()
    for ax, chosen, changed in ((scores, SCORE_BOUNDS, "scores"), (losses, LOSS_BOUNDS, "loss")):
        for i, (statement, (name, marker)) in enumerate(chosen.items()):
            cloud = select(points, {"statement": statement, "method": "merged"})
            cloud = cloud[cloud["actual"] > 1e-3]  # below, a logarithmic axis shows only noise
            colour = ("#009E73", "#CC79A7")[i]  # neither model's: both are in every cloud
            options = {"marker": marker, "color": colour, "label": name}
            ax.plot(cloud["actual"], cloud["bound"], **options, **CLOUD)
        span = np.array([max(ax.get_xlim()[0], 1e-3), ax.get_xlim()[1]])
        ax.plot(span, span, color=INK, lw=1)
        ax.set(xscale="log", yscale="log", xlabel=f"change of the {changed}")
        ax.set_ylabel("at most, by the bound")
        ax.minorticks_off()
        ax.legend(loc="lower right")


def margins(axes: list[Axes], rows: pd.DataFrame, points: pd.DataFrame) -> None:
    """Draw the largest score change over half the expert's lead, by whether the answer stayed."""
    changes = select(points, {"statement": "margin"})
    ratio = np.log10((changes["actual"] / changes["bound"].clip(lower=1e-9)).clip(1e-2, 1e3))
    ends = np.floor(ratio.min() * 5), np.ceil(ratio.max() * 5) + 1
    edges = np.arange(*ends) / 5  # one edge on the limit, at 0
    styles: dict[int, dict[str, Any]] = {
        1: {"color": COLOURS["featcal"], "label": "answer stays"},
        0: {"color": COLOURS["merged"], "label": "answer changes", **HATCHED},
    }
    for ax, method in zip(axes, MODELS, strict=True):
        below = np.zeros(len(edges) - 1)
        for kept, options in styles.items():
            chosen = (changes["method"] == method) & (changes["kept"] == kept)
            counts = np.histogram(ratio[chosen], edges)[0]
            filled = counts > 0
            ax.bar(edges[:-1][filled], counts[filled], 0.18, below[filled], align="edge", **options)
            below += counts
        ax.axvline(0, color=INK, lw=1.5, ls="--")
        stated = select(rows, {"method": method, "statement": "margin"})
        kept = stated.groupby("quantity")["value"].mean()
        sure, fact = kept["kept_by_score"], kept["kept_in_fact"]
        ax.set_title(f"{NAMES[method]}: {sure:.0f} % guaranteed, {fact:.0f} % in fact")
        ax.set_xticks([-1, 0, 1, 2], ["0.1", "1", "10", "100"])
        ax.set(ylabel="images")
    axes[0].legend()
    axes[1].set_xlabel("largest score change / half the expert's lead")


def solved_inputs(axes: list[Axes], rows: pd.DataFrame, points: pd.DataFrame) -> None:
    """Draw how far a linear's inputs move after its solution, and its fit before and after."""
    moved, fits = axes
    kinds = (("stale", "stale features", "merged"), ("forward", "forward order", "featcal"))
    for i, (kind, name, method) in enumerate(kinds):
        values = by_block(rows, "featcal", f"{kind}_moved", "proposition_8")
        options = HATCHED if kind == "stale" else {}
        pair_of_bars(moved, values, i, color=COLOURS[method], label=name, **options)
        for part, (deployment, style) in FITS.items():
            fit = by_block(rows, "featcal", f"{kind}_{part}", "proposition_8")
            line = {"color": COLOURS[method], "marker": MARKERS[method], "markersize": 7}
            label = f"{name}, {deployment}"
            fits.plot(block_ticks(fits, fit.index), fit, style, label=label, **line)
    moved.set(xlabel="block", ylabel="inputs moved (%)")
    moved.legend()
    fits.set(xlabel="block", ylabel="misfit of linears (%)", ylim=(0, None))
    fits.legend(fontsize=10)


Drawing = Callable[[list[Axes], pd.DataFrame, pd.DataFrame], None]
PANELS: dict[str, tuple[Drawing, int, float]] = {  # panels, and the height of each
    "decomposition": (decomposition, 2, 3.0), "propagation": (propagation, 2, 3.2), "bounds": (bounds, 3, 3.6),
    "margins": (margins, 2, 3.0), "sources": (solved_inputs, 2, 3.2),
}  # fmt: skip
