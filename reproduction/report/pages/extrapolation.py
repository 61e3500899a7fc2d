"""Tables and figure on calibration or extrapolation: ρ, order and α, the default's parts, and ρ on a part of the weights."""

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import WIDTH, drawing, shown
from reproduction.report.html import PageOutput, compact, note, table
from reproduction.report.paper import IMAGES, REAL
from reproduction.report.statistics import Estimate, estimate, noise

NOT_RUN = "○ not run: no study of extrapolation."
ALONE = "anchor alone"
PARTS = ("residual target", "order", "joint bias", "α", "ρ", "λ")
SOURCES = {REAL: "MiniLM, real texts", IMAGES: "smaller CLIP, synthetic images"}
ORDERS = {"stale": "merger’s features", "forward": "forward order", "sites": "site by site"}
ORDER_LOOKS = {"stale": ("#009E73", "s"), "forward": ("#0072B2", "^"), "sites": ("#D55E00", "o")}
PLACES = {
    "nowhere": "no weight", "below": "weights, directions below λ", "above": "weights, directions above λ",
    "weights": "all weights", "everything": "weights, biases and norms",
}  # fmt: skip
BELOW = {
    "directions": "directions", "energy": "energy of the inputs", "change": "squared change of the merger",
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

    def lines(self) -> dict[str, dict[float, pd.DataFrame]]:
        """Return by order and α the rows at every ρ, those of the anchor alone first."""
        settings = self.settings
        if not settings:
            return self.swept()
        blends = settings["blends"]
        found = {ALONE: {rho: self.rows("anchor", anchor_blend=rho) for rho in blends}}
        for order, alpha in product(settings["orders"], settings["interpolations"]):
            rows = {
                rho: self.rows("cell", order, interpolation=alpha, anchor_blend=rho)
                for rho in blends
            }
            found[f"{ORDERS[order]}, α {alpha:g}"] = rows
        return found

    def swept(self) -> dict[str, dict[float, pd.DataFrame]]:
        """Return the same where only ρ was varied (Figure 5), at the tuned λ and α."""
        wanted = {"upstream": "task_arithmetic", "setting": "suite", "parameter": "anchor_blend"}
        sweep = select(self.ours.table("sweep"), wanted)
        by_rho = {float(rho): select(sweep, {"at": rho}) for rho in sorted(set(sweep["at"]))}
        if not by_rho:
            return {}
        own = float(sweep[sweep["chosen"] == 1]["at"].iloc[0])
        both = {
            rho: select(
                self.ours.table("scores"), {"upstream": "task_arithmetic", "method": method}
            )
            for rho, method in ((1.0, "merged"), (own, "anchor"))
        }
        return {ALONE: both, f"{ORDERS['forward']}, λ and α fixed": by_rho}


def cells_of(suite: str) -> dict[str, Cells]:
    """Return what was run of the study, by the name of the model."""
    found = {name: Cells(Evidence(suite, role, "8")) for role, name in SOURCES.items()}
    return {name: one for name, one in found.items() if one.settings}


def by_blend(suite: str) -> PageOutput:
    """Draw the average score by ρ for every order and α, and of the anchor alone."""
    return shown(_by_blend(suite), "scores by ρ")


def _by_blend(suite: str) -> Figure | None:
    known = lines_of(suite)
    if not known:
        return None
    with drawing():
        figure = Figure(figsize=(WIDTH, 3.6 * len(known) + 1.0), layout="constrained")
        spots = figure.subplots(len(known), 1, squeeze=False)[:, 0]
        for axes, (name, lines) in zip(spots, known.items(), strict=True):
            for words, by_rho in lines.items():
                means = [rows["value"].mean() for rows in by_rho.values()]
                axes.plot(list(by_rho), means, label=words, **look_of(words))
            axes.set_xscale("log", base=2)
            blends = list(dict.fromkeys(rho for by_rho in lines.values() for rho in by_rho))
            axes.set_xticks(blends, [f"{rho:g}" for rho in blends])
            axes.minorticks_off()
            axes.set(title=name, xlabel="ρ", ylabel="average score (%)")
        drawn = [line for axes in spots for line in axes.get_lines()]
        once = {str(line.get_label()): line for line in drawn}
        figure.legend(once.values(), once, loc="outside upper center", ncols=2, fontsize="small")
        return figure


def look_of(words: str) -> dict[str, Any]:
    """Return colour and marker of an order; a line with α below 1 is dashed."""
    looks = {ORDERS[order]: look for order, look in ORDER_LOOKS.items()}
    colour, marker = looks.get(words.split(",")[0], ("#777777", "x"))
    return {"color": colour, "marker": marker, "ls": "--" if "α 0." in words else "-"}


def by_order(suite: str) -> PageOutput:
    """List scores and divergences by ρ for every order and α, and what ρ = 1 and the last ρ gain."""
    rows, known = [], lines_of(suite)
    if not known:
        return PageOutput(note(NOT_RUN))
    blends = sorted({rho for own in known.values() for line in own.values() for rho in line})
    for name, lines in known.items():
        merged = estimate(lines[ALONE][1.0])
        for words, by_rho in lines.items():
            first, last = (estimate(by_rho[rho]) for rho in (min(by_rho), max(by_rho)))
            cells = [_scored(by_rho[rho]) if rho in by_rho else "–" for rho in blends]
            cells += ["–" if words == ALONE else _lead(first, merged), _lead(last, first)]
            kind = "fc-merger" if words == ALONE else ""
            rows.append((kind, [f"{words}<small>{name}</small>", *cells]))
    head = ["", *(f"ρ = {rho:g}" for rho in blends), "ρ = 1 over merged", "largest ρ over 1"]
    caption = "Average score (%) after task arithmetic; small: λ and divergence from the experts; ± two standard errors"
    return PageOutput(table(head, rows, caption, "fc-long"))


def lines_of(suite: str) -> dict[str, dict[str, dict[float, pd.DataFrame]]]:
    """Return the rows of every model that has some, by name, line and ρ."""
    found = {name: Cells(Evidence(suite, role, "8")).lines() for role, name in SOURCES.items()}
    return {name: lines for name, lines in found.items() if lines}


def _scored(rows: pd.DataFrame) -> str:
    one = estimate(rows)
    if one is None:
        return "–"
    if "divergence" not in rows:
        return f"{one.mean:.1f}"
    ridge = float(rows["ridge"].iloc[0])
    chosen = "by halves" if math.isnan(ridge) else compact(ridge)
    told = "" if ridge > 1e6 else f"λ {chosen}, "
    return f"{one.mean:.1f}<small>{told}KL {rows['divergence'].iloc[0]:.2f}</small>"


def _lead(left: Estimate | None, right: Estimate | None) -> str:
    if left is None or right is None:
        return "–"
    if f"{abs(left.mean - right.mean):.1f} {noise(left, right):.1f}" == "0.0 0.0":
        return "no change"
    return f"{round(left.mean - right.mean, 1) + 0.0:+.1f} ± {noise(left, right):.1f}"


def spectrum(suite: str) -> PageOutput:
    """List scores with ρ on a part of the weights, and how much lies below λ."""
    rows, below = [], []
    for name, study in cells_of(suite).items():
        for ridge, shares in study.ours.settings("extrapolation")["below"].items():
            words = f"{name}, λ {compact(float(ridge))}"
            found = {place: study.rows("spectrum", place, ridge=float(ridge)) for place in PLACES}
            start = estimate(found["nowhere"])
            for place, own in found.items():
                one, first = estimate(own), place == "nowhere"
                score = f"{one.mean:.1f}" if one else "–"
                divergence = f"{own['divergence'].iloc[0]:.3f}" if one else "–"
                cells = [score, divergence, "–" if first else _lead(one, start)]
                kind = "fc-merger" if first else ""
                rows.append((kind, [f"{PLACES[place]}<small>{words}</small>", *cells]))
            told = (f"{part} {100 * shares[key]:.0f} %" for key, part in BELOW.items())
            below.append(f"Below λ, {words}: {', '.join(told)}.")
    if not rows:
        return PageOutput(note(NOT_RUN))
    head = ["ρ = 8 acts on", "Score (%)", "Divergence", "Over no weight"]
    caption = (
        "ρ on a part of the weights and 1 elsewhere; forward order, α 0.3; ± two standard errors"
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
                    cells.append(_scored(first))
                else:
                    cells.append(_lead(estimate(study.rows(choice, name)), estimate(first)))
    head = [""]
    for name in studies:
        head += [f"added to the printed settings, {name}", f"left out of the default’s, {name}"]
    caption = "Change of the average score (points) after task arithmetic, 32 samples per task; ± two standard errors"
    return PageOutput(table(head, rows, caption, "fc-long"))
