"""Tables and figure on calibration or extrapolation: ρ, order and α, the default's parts, and ρ on a part of the weights."""

import math
from itertools import product

import pandas as pd
from matplotlib.figure import Figure

from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import WIDTH, drawing, shown
from reproduction.report.html import PageOutput, change, compact, listed, note
from reproduction.report.paper import IMAGES, REAL
from reproduction.report.statistics import estimate

MISSING = "no study of extrapolation"
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


def rows_of(ours: Evidence, choice: str, variant: str = "", **numbers: float) -> pd.DataFrame:
    """Return the scored rows of one model."""
    return select(ours.table("extrapolation"), {"choice": choice, "variant": variant, **numbers})


def lines(ours: Evidence) -> dict[str, dict[float, pd.DataFrame]]:
    """Return by order and α the rows at every ρ, those of the anchor alone first."""
    study = ours.settings("extrapolation").get("study")
    if not study:
        return swept(ours)
    blends = study["blends"]
    found = {ALONE: {rho: rows_of(ours, "anchor", anchor_blend=rho) for rho in blends}}
    for order, alpha in product(study["orders"], study["interpolations"]):
        found[f"{ORDERS[order]}, α {alpha:g}"] = {
            rho: rows_of(ours, "cell", order, interpolation=alpha, anchor_blend=rho)
            for rho in blends
        }
    return found


def swept(ours: Evidence) -> dict[str, dict[float, pd.DataFrame]]:
    """Return the same where only ρ was varied (Figure 5), at the tuned λ and α."""
    merger = {"upstream": "task_arithmetic"}
    wanted = merger | {"setting": "suite", "parameter": "anchor_blend"}
    sweep, scores = select(ours.table("sweep"), wanted), ours.table("scores")
    if sweep.empty:
        return {}
    own = float(sweep[sweep["chosen"] == 1]["at"].iloc[0])
    both = {1.0: select(scores, merger | {"method": "merged"})}
    both[own] = select(scores, merger | {"method": "anchor"})
    by_rho = {float(rho): rows for rho, rows in sweep.groupby("at")}
    return {ALONE: both, f"{ORDERS['forward']}, λ and α fixed": by_rho}


def studies(suite: str) -> dict[str, Evidence]:
    """Return the results that have the study, by the name of the model."""
    found = {name: Evidence(suite, role, "8") for role, name in SOURCES.items()}
    return {name: ours for name, ours in found.items() if ours.settings("extrapolation")}


def by_blend(suite: str) -> PageOutput:
    """Draw the average score by ρ for every order and α, and of the anchor alone."""
    what, known = "scores by ρ", lines_of(suite)
    if not known:
        return shown(None, what)
    looks = {ORDERS[order]: look for order, look in ORDER_LOOKS.items()}
    with drawing():
        figure = Figure(figsize=(WIDTH, 3.6 * len(known) + 1.0), layout="constrained")
        spots = figure.subplots(len(known), 1, squeeze=False)[:, 0]
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
    """List scores and divergences by ρ for every order and α, and what ρ = 1 and the last ρ gain."""
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
    caption = "Average score (%) after task arithmetic; small: λ and divergence from the experts; ± two standard errors"
    return listed(head, rows, caption, "fc-long", MISSING)


def lines_of(suite: str) -> dict[str, dict[str, dict[float, pd.DataFrame]]]:
    """Return the rows of every model that has some, by name, line and ρ."""
    found = {name: lines(Evidence(suite, role, "8")) for role, name in SOURCES.items()}
    return {name: own for name, own in found.items() if own}


def _scored(rows: pd.DataFrame) -> str:
    one = estimate(rows)
    if one is None:
        return "–"
    if "divergence" not in rows:
        return f"{one.mean:.1f}"
    ridge = float(rows["ridge"].iloc[0])
    chosen = "by halves" if math.isnan(ridge) else compact(ridge)
    at = "" if ridge > 1e6 else f"λ {chosen}, "
    return f"{one.mean:.1f}<small>{at}KL {rows['divergence'].iloc[0]:.2f}</small>"


def spectrum(suite: str) -> PageOutput:
    """List scores with ρ on a part of the weights, and how much lies below λ."""
    rows, below = [], []
    for name, ours in studies(suite).items():
        for ridge, shares in ours.settings("extrapolation")["below"].items():
            words = f"{name}, λ {compact(float(ridge))}"
            found = {
                place: rows_of(ours, "spectrum", place, ridge=float(ridge)) for place in PLACES
            }
            start = estimate(found["nowhere"])
            for place, own in found.items():
                one, first = estimate(own), place == "nowhere"
                cells = ["–", "–", "–" if first else change(one, start)]
                if one:
                    cells[:2] = f"{one.mean:.1f}", f"{own['divergence'].iloc[0]:.3f}"
                kind = "fc-merger" if first else ""
                rows.append((kind, [f"{PLACES[place]}<small>{words}</small>", *cells]))
            parts = (f"{part} {100 * shares[key]:.0f} %" for key, part in BELOW.items())
            below.append(f"Below λ, {words}: {', '.join(parts)}.")
    head = ["ρ = 8 acts on", "Score (%)", "Divergence", "Over no weight"]
    caption = (
        "ρ on a part of the weights and 1 elsewhere; forward order, α 0.3; ± two standard errors"
    )
    found = listed(head, rows, caption, missing=MISSING)
    return PageOutput(found.html + note(" ".join(below))) if rows else found


def parts(suite: str) -> PageOutput:
    """List what every part of the default's settings adds to the paper's, and costs when left out."""
    found = studies(suite)
    rows = [[name or "start"] for name in ("", *PARTS)] if found else []
    head = [""]
    for name, ours in found.items():
        head += [f"added to the printed settings, {name}", f"left out of the default’s, {name}"]
        blend = ours.settings("extrapolation")["stream_blend"]
        whole = rows_of(ours, "stream", anchor_blend=blend)
        for choice, first in (("alone", rows_of(ours, "alone")), ("left out", whole)):
            rows[0].append(_scored(first))
            for cells, part in zip(rows[1:], PARTS, strict=True):
                cells.append(change(estimate(rows_of(ours, choice, part)), estimate(first)))
    caption = "Change of the average score (points) after task arithmetic, 32 samples per task; ± two standard errors"
    return listed(head, rows, caption, "fc-long", MISSING)
