"""Tables and figure on calibration or extrapolation: ρ, order and α, the default's parts, and ρ on a part of the weights."""

import math
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import WIDTH, drawing, shown
from reproduction.report.html import PageOutput, compact, note, table
from reproduction.report.paper import IMAGES, REAL
from reproduction.report.statistics import Estimate, estimate, noise

NOT_RUN = "○ not run: no study of extrapolation."
PARTS = ("residual target", "order", "joint bias", "α", "ρ", "λ")
SOURCES = {REAL: "MiniLM, real texts", IMAGES: "smaller CLIP, synthetic images"}
ORDERS = {"stale": "merger’s features", "forward": "forward order", "sites": "site by site"}
ORDER_LOOKS = {"stale": ("#009E73", "s"), "forward": ("#0072B2", "^"), "sites": ("#D55E00", "o")}
PLACES = {
    "nowhere": "no weight", "below": "weights, directions below λ", "above": "weights, directions above λ",
    "weights": "all weights", "everything": "weights, biases and norms",
}  # fmt: skip
BELOW = {
    "directions": "Directions below λ", "energy": "Energy of the inputs below λ",
    "change": "Squared change of the merger below λ",
}  # fmt: skip


@dataclass(frozen=True)
class Cells:
    """The study of calibration and extrapolation of one model."""

    ours: Evidence

    @property
    def settings(self) -> dict[str, Any]:
        """Return the study's settings; empty if not run."""
        return self.ours.settings("extrapolation").get("study", {})

    def rows(self, choice: str, variant: str = "", **numbers: float) -> pd.DataFrame:
        """Return the scored rows of one model."""
        wanted = {"choice": choice, "variant": variant, **numbers}
        return select(self.ours.table("extrapolation"), wanted)

    def lines(self) -> dict[tuple[str, float], dict[float, pd.DataFrame]]:
        """Return by order and α the rows at every ρ; the anchor alone has no order."""
        settings, blends = self.settings, self.settings.get("blends", ())
        found = {("", 0.0): {rho: self.rows("anchor", anchor_blend=rho) for rho in blends}}
        for order in settings.get("orders", ()):
            for alpha in settings["interpolations"]:
                found[order, alpha] = {
                    rho: self.rows("cell", order, interpolation=alpha, anchor_blend=rho)
                    for rho in blends
                }
        return found if blends else {}


def cells_of(suite: str) -> dict[str, Cells]:
    """Return the studies that were run, by the name of the model."""
    found = {name: Cells(Evidence(suite, role, "8")) for role, name in SOURCES.items()}
    return {name: one for name, one in found.items() if one.settings}


def by_blend(suite: str) -> PageOutput:
    """Draw the average score by ρ for every order and α, and of the anchor alone."""
    return shown(_by_blend(suite), "scores by ρ")


def _by_blend(suite: str) -> Figure | None:
    studies = cells_of(suite)
    if not studies:
        return None
    with drawing():
        figure = Figure(figsize=(WIDTH, 3.4 * len(studies) + 0.9), layout="constrained")
        spots = figure.subplots(len(studies), 1, squeeze=False)[:, 0]
        for axes, (name, study) in zip(spots, studies.items(), strict=True):
            for (order, alpha), by_rho in study.lines().items():
                colour, marker = ORDER_LOOKS.get(order, ("#777777", "x"))
                words = f"{ORDERS[order]}, α = {alpha:g}" if order else "anchor alone"
                solid = not order or alpha == 1
                look: dict[str, Any] = {"ls": "-" if solid else "--", "marker": marker}
                means = [rows["value"].mean() for rows in by_rho.values()]
                axes.plot(list(by_rho), means, color=colour, label=words, **look)
            axes.set_xscale("log", base=2)
            axes.set_xticks(list(by_rho), [f"{rho:g}" for rho in by_rho])
            axes.minorticks_off()
            axes.set(title=name, xlabel="ρ", ylabel="average score (%)")
        handles, labels = spots[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=2, fontsize="small")
        return figure


def by_order(suite: str) -> PageOutput:
    """List scores and divergences by ρ for every order and α, and what ρ = 1 and the last ρ gain."""
    rows, blends = [], dict[float, None]()
    for name, study in cells_of(suite).items():
        lines = study.lines()
        merged = estimate(lines["", 0.0][1.0])
        for (order, alpha), by_rho in lines.items():
            words = f"{ORDERS[order]}, α {alpha:g}" if order else "anchor alone"
            blends |= dict.fromkeys(by_rho)
            known = [estimate(one) for one in by_rho.values()]
            cells = [_scored(one, own) for one, own in zip(known, by_rho.values(), strict=True)]
            cells += [_lead(known[0], merged) if order else "–", _lead(known[-1], known[0])]
            rows.append(("" if order else "fc-merger", [f"{words}<small>{name}</small>", *cells]))
    if not rows:
        return PageOutput(note(NOT_RUN))
    head = [
        "",
        *(f"ρ = {rho:g}" for rho in blends),
        "ρ = 1 over merged",
        f"ρ = {max(blends):g} over 1",
    ]
    caption = "Average score (%) after task arithmetic, 32 samples per task; small: λ and divergence from the experts; ± two standard errors"
    return PageOutput(table(head, rows, caption, "fc-long"))


def _scored(one: Estimate | None, rows: pd.DataFrame) -> str:
    if one is None:
        return "–"
    ridge = float(rows["ridge"].iloc[0])
    chosen = "by halves" if math.isnan(ridge) else compact(ridge)
    told = "" if ridge > 1e6 else f"λ {chosen}, "
    return f"{one.mean:.1f}<small>{told}KL {rows['divergence'].iloc[0]:.2f}</small>"


def _lead(left: Estimate | None, right: Estimate | None) -> str:
    if left is None or right is None:
        return "–"
    return f"{round(left.mean - right.mean, 1) + 0.0:+.1f} ± {noise(left, right):.1f}"


def spectrum(suite: str) -> PageOutput:
    """List scores with ρ on a part of the weights, and how much lies below λ."""
    rows, below = [], []
    for name, study in cells_of(suite).items():
        found = {place: study.rows("spectrum", place) for place in PLACES}
        start = estimate(found["nowhere"])
        for place, own in found.items():
            one = estimate(own)
            score = "–" if one is None else f"{one.mean:.1f}"
            divergence = f"{own['divergence'].iloc[0]:.3f}" if one else "–"
            lead = "–" if place == "nowhere" else _lead(one, start)
            kind = "fc-merger" if place == "nowhere" else ""
            rows.append((kind, [f"{PLACES[place]}<small>{name}</small>", score, divergence, lead]))
        shares = study.ours.settings("extrapolation")["below"]
        told = (f"{words.lower()} {100 * shares[key]:.0f} %" for key, words in BELOW.items())
        below.append(f"{name}: {', '.join(told)}.")
    if not rows:
        return PageOutput(note(NOT_RUN))
    head = ["ρ above 1 acts on", "Score (%)", "Divergence", "Over no weight"]
    caption = (
        "Forward order, α 0.3, the largest ρ and its λ; ρ = 1 elsewhere; ± two standard errors"
    )
    return PageOutput(table(head, rows, caption) + note(" ".join(below)))


def parts(suite: str) -> PageOutput:
    """List what every part of the default's settings adds to the paper's, and costs when left out."""
    studies = cells_of(suite)
    if not studies:
        return PageOutput(note(NOT_RUN))
    rows = [("", [name or "start"]) for name in ("", *PARTS)]
    for study in studies.values():
        facts = study.ours.settings("extrapolation")
        start = study.rows("alone")
        whole = study.rows("stream", anchor_blend=facts["stream_blend"])
        for (_, cells), name in zip(rows, ("", *PARTS), strict=True):
            for choice, first in (("alone", start), ("left out", whole)):
                if not name:
                    cells.append(_scored(estimate(first), first))
                else:
                    cells.append(_lead(estimate(study.rows(choice, name)), estimate(first)))
    head = [""]
    for name in studies:
        head += [f"added to the printed settings, {name}", f"left out of the default’s, {name}"]
    caption = "Change of the average score (points) after task arithmetic, 32 samples per task; ± two standard errors"
    return PageOutput(table(head, rows, caption, "fc-long"))
