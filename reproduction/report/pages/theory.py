"""Build the theory page: every numbered statement of the paper with its worst case, and the plots."""

from collections.abc import Callable
from html import escape
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reproduction.report.claims import claims, studied_setting
from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import (
    COLOURS,
    INK,
    MARKERS,
    NAMES,
    block_name,
    depth,
    shown,
    stacked,
)
from reproduction.report.html import PageOutput, chip, listed
from reproduction.report.page import verdict_table
from reproduction.report.paper import IMAGES, REAL, packaged
from reproduction.report.verdicts import judged

MODELS = ("merged", "featcal")
HATCHED: dict[str, Any] = {"hatch": "////", "edgecolor": "white", "lw": 0.4}
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "from_upstream": ("passed on by earlier blocks", {"color": "#BBBBBB"}),
    "from_mismatch": ("added by this block", {"color": "#D55E00", **HATCHED}),
}
LOSSES = {
    "proposition_7": ("Prop. 7: gradient × score change", "o"), "corollary_2": ("Cor. 2: constants × final drift", "^"),
}  # fmt: skip
SCORES = {
    "proposition_3": ("Prop. 3: along the segment", "o"), "proposition_6": ("Prop. 6: every direction", "^"),
}  # fmt: skip
CLOUD: dict[str, Any] = {"ls": "none", "markersize": 4.5, "mew": 0, "alpha": 0.6}
NODES = {
    "recursion_digits": ("one block (Eq. 4)", "o", "-"), "unrolled_digits": ("all blocks (Eq. 5)", "s", "--"),
    "digits_by_nodes": ("loss (Eq. 41)", "^", ":"),
}  # fmt: skip
FITS = {"on_source": ("as solved", "--"), "deployed": ("as deployed", "-")}


def rows(suite: str, role: str, file: str = "theory") -> pd.DataFrame:
    """Return all lines of the study, of the calibrated model only those at the suite's main setting."""
    found = Evidence(suite, role, "8").table(file)
    return found[found["setting"].isin(["", studied_setting(suite)])]


def checks(suite: str) -> PageOutput:
    """List every statement with its worst case, how tight it is, and the verdict, by source."""
    chosen, body = [claim for claim in claims() if claim.place == "theory"], []
    by_source = {source.key: words for source, (words, *_) in judged(suite, chosen).items()}
    for name, facts in packaged("statements.yaml").items():
        cells = [f"{facts['name']}<small>{facts['section']}</small>"]
        cells += [escape(facts["says"]), escape(facts["checked"])]
        for role, source in ((REAL, "real_encoder"), (IMAGES, suite)):
            own = select(rows(suite, role), {"statement": name})
            worst = (worst_case(own, method, facts["quantity"]) for method in MODELS)
            found = (v.word for v in by_source[source] if v and v.claim.id == facts["claim"])
            word = next(found, "not run")
            cells.append(f"{chip(word)}<small>{' · '.join(worst)}</small>")
        body.append(cells)
    head = ["Statement", "In plain words", "Checked on", "Real encoder", "Synthetic images"]
    caption = "The numbered statements. Small: worst case of the merged · of the calibrated model"
    return listed(head, body, caption, "fc-words")


def conditions(suite: str) -> PageOutput:
    """List how often the conditions of the statements are met, in percent, mean over tasks."""
    lines = []
    for name, facts in packaged("statements.yaml").items():
        for quantity, method in facts.get("met", []):
            words = f"{quantity.replace('_', ' ')}<small>{facts['name']}, {NAMES[method]}</small>"
            wanted = {"statement": name, "quantity": quantity, "method": method, "block": ""}
            found = (select(rows(suite, role), wanted)["value"] for role in (REAL, IMAGES))
            lines.append([words, *(f"{own.mean():.1f}" if len(own) else "–" for own in found)])
    head = ["Quantity (%)", "Real encoder", "Synthetic images"]
    return listed(head, lines, "What the statements need, and how often it is met")


def verdicts(suite: str) -> PageOutput:
    """List what the paper concludes from its statements, with verdicts."""
    stated = {facts["claim"] for facts in packaged("statements.yaml").values()}
    own = [claim for claim in claims() if claim.place == "theory" and claim.id not in stated]
    return PageOutput(verdict_table(own, judged(suite, own), "What the paper concludes from them"))


def worst_case(own: pd.DataFrame, method: str, quantity: str) -> str:
    """Return the digits of an equation, or the room and tightness of an inequality."""
    ours = own[(own["method"] == method) & (own["block"] == "")]
    worst = ours[(ours["quantity"] == quantity) & (ours["task"] == "")]
    if worst.empty:
        return "–"
    value = float(worst["value"].iloc[0])
    if quantity == "digits":
        return f"{value:.1f} digits"
    tight = ours[ours["quantity"] == "tightness"]["value"]
    return f"{value:+,.1f} %" + (f" (tight {tight.mean():.2g} %)" if len(tight) else "")


def figure(panel: str, role: str, suite: str) -> PageOutput:
    """Draw one figure of the page, or note that it was not run."""
    lines, points = rows(suite, role), rows(suite, role, "theory_points")
    if lines.empty or points.empty:
        return shown(None, panel)
    draw, panels, height = PANELS[panel]
    with stacked(panels, height * panels) as (figure, axes):
        draw(figure, axes, lines, points)
        return shown(figure, panel)


def by_block(rows: pd.DataFrame, method: str, quantity: str, statement: str) -> pd.Series:
    """Return means over tasks, by block in forward order."""
    found = select(rows, {"method": method, "quantity": quantity, "statement": statement})
    return found[found["block"] != ""].groupby("block", sort=True)["value"].mean()


def numbered(axes: Axes, blocks: Any) -> list[int]:
    """Set ticks 1, 2, … for blocks 00, 01, …"""
    axes.set_xticks(range(len(blocks)), map(block_name, blocks))
    axes.grid(axis="x", visible=False)
    return list(range(len(blocks)))


def pair_of_bars(axes: Axes, values: pd.Series, place: int, **look: Any) -> None:
    """Draw the first or second of two bars at every block."""
    places = [at + (place - 0.5) * 0.38 for at in numbered(axes, values.index)]
    axes.bar(places, values, width=0.36, **look)


def decomposition(
    figure: Figure, axes: list[Axes], rows: pd.DataFrame, points: pd.DataFrame
) -> None:
    """Draw drift after every block, stacked from the parts of Proposition 1."""
    for ax, method in zip(axes, MODELS, strict=True):
        base = 0.0
        for quantity, (name, look) in PARTS.items():
            values = by_block(rows, method, quantity, "proposition_1")
            places = numbered(ax, values.index)
            ax.bar(places, values, bottom=base, width=0.7, label=name, **look)
            base = values.to_numpy() + base
        ax.set_title(f"{NAMES[method]} model" if method == "merged" else NAMES[method])
        ax.set(ylabel="drift (% of the\nexpert's features)")
    axes[1].sharey(axes[0])
    axes[1].set_xlabel("after block")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)


def propagation(_: Figure, axes: list[Axes], rows: pd.DataFrame, points: pd.DataFrame) -> None:
    """Draw where final drift comes from, and how fast the quadrature converges."""
    origin, nodes = axes
    for i, method in enumerate(MODELS):
        share = by_block(rows, method, "share_of_final", "proposition_2")
        share = share.loc[sorted(share.index, key=depth)]
        look = HATCHED if method == "merged" else {}
        pair_of_bars(origin, share, i, color=COLOURS[method], label=NAMES[method], **look)
    origin.axhline(0, color=INK, lw=0.8)
    origin.set(xlabel="block whose mismatch it was", ylabel="share of final drift (%)")
    origin.legend()
    for quantity, (name, marker, style) in NODES.items():
        found = select(rows, {"method": "merged", "quantity": quantity})
        worst = 10.0 ** -found[found["task"] != ""].groupby("nodes")["value"].min()
        look = {"marker": marker, "label": name, "color": INK, "markersize": 7}
        nodes.plot(worst.index, worst, style, **look)
    nodes.set_xscale("log", base=2)
    nodes.set_yscale("log")
    ticks = sorted(set(rows["nodes"].dropna()))
    nodes.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
    nodes.minorticks_off()
    nodes.set(xlabel="quadrature nodes", ylabel="largest relative error")
    nodes.legend(loc="lower left")


def bounds(_: Figure, axes: list[Axes], rows: pd.DataFrame, points: pd.DataFrame) -> None:
    """Draw what three bounds allow against what happens."""
    growth, scores, losses = axes
    found = select(points, {"statement": "proposition_5"})
    for method in MODELS:
        own = select(found, {"method": method})
        look = {"marker": MARKERS[method], "color": COLOURS[method], "label": NAMES[method]}
        growth.plot(own["actual"], own["bound"], **CLOUD, **look)
    ends = [min(found["actual"].min(), 1.0) - 0.05, found["actual"].quantile(0.99) + 0.05]
    growth.plot(ends, ends, color=INK, lw=1)
    growth.axhline(1, color=INK, lw=1, ls=":")
    growth.set(xlim=ends, xlabel="drift after a block / before it", ylabel="at least, by Prop. 5")
    growth.legend()
    for ax, chosen, what in ((scores, SCORES, "scores"), (losses, LOSSES, "loss")):
        for i, (statement, (name, marker)) in enumerate(chosen.items()):
            own = select(points, {"statement": statement, "method": "merged"})
            own = own[own["actual"] > 1e-3]  # below, a logarithmic axis shows nothing but noise
            colour = ("#009E73", "#CC79A7")[i]  # neither model's: both are in every cloud
            look = {"marker": marker, "color": colour, "label": name}
            ax.plot(own["actual"], own["bound"], **look, **CLOUD)
        span = np.array([max(ax.get_xlim()[0], 1e-3), ax.get_xlim()[1]])
        ax.plot(span, span, color=INK, lw=1)
        ax.set(xscale="log", yscale="log", xlabel=f"change of the {what}")
        ax.set_ylabel("at most, by the bound")
        ax.minorticks_off()
        ax.legend(loc="lower right")


def margins(_: Figure, axes: list[Axes], rows: pd.DataFrame, points: pd.DataFrame) -> None:
    """Draw the largest score change over half the expert's lead, by whether the answer stayed."""
    found = select(points, {"statement": "margin"})
    ratio = np.log10((found["actual"] / found["bound"].clip(lower=1e-9)).clip(1e-2, 1e3))
    ends = np.floor(ratio.min() * 5), np.ceil(ratio.max() * 5) + 1
    edges = np.arange(*ends) / 5  # one edge on the limit, at 0
    looks: dict[int, dict[str, Any]] = {
        1: {"color": COLOURS["featcal"], "label": "answer stays"},
        0: {"color": COLOURS["merged"], "label": "answer changes", **HATCHED},
    }
    for ax, method in zip(axes, MODELS, strict=True):
        below = np.zeros(len(edges) - 1)
        for kept, look in looks.items():
            own = ratio[(found["method"] == method) & (found["kept"] == kept)]
            counts = np.histogram(own, edges)[0]
            there = counts > 0
            ax.bar(edges[:-1][there], counts[there], 0.18, below[there], align="edge", **look)
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


def solved_inputs(_: Figure, axes: list[Axes], rows: pd.DataFrame, points: pd.DataFrame) -> None:
    """Draw how far a linear's inputs move after its solution, and what that does to its fit."""
    moved, fits = axes
    kinds = (("stale", "stale features", "merged"), ("forward", "forward order", "featcal"))
    for i, (kind, name, method) in enumerate(kinds):
        values = by_block(rows, "featcal", f"{kind}_moved", "proposition_8")
        look = HATCHED if kind == "stale" else {}
        pair_of_bars(moved, values, i, color=COLOURS[method], label=name, **look)
        for part, (said, style) in FITS.items():
            fit = by_block(rows, "featcal", f"{kind}_{part}", "proposition_8")
            line = {"color": COLOURS[method], "marker": MARKERS[method], "label": f"{name}, {said}"}
            fits.plot(numbered(fits, fit.index), fit, style, markersize=7, **line)
    moved.set(xlabel="block", ylabel="inputs moved (%)")
    moved.legend()
    fits.set(xlabel="block", ylabel="misfit of linears (%)", ylim=(0, None))
    fits.legend(fontsize=10)


Drawing = Callable[[Figure, list[Axes], pd.DataFrame, pd.DataFrame], None]
PANELS: dict[str, tuple[Drawing, int, float]] = {  # panels, and the height of each
    "decomposition": (decomposition, 2, 3.0), "propagation": (propagation, 2, 3.2), "bounds": (bounds, 3, 3.6),
    "margins": (margins, 2, 3.0), "sources": (solved_inputs, 2, 3.2),
}  # fmt: skip
