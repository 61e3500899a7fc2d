"""The page for a first reader: FeatCal in one drawing, the measured drift below it, and its outcome
in one sentence.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from reproduction.report import figures
from reproduction.report.claims import INSIDE, main_setting
from reproduction.report.evidence import Evidence
from reproduction.report.figures import BARS, COLOURS, INK, MARKERS, NAMES
from reproduction.report.html import PageOutput, note
from reproduction.report.page import Page
from reproduction.report.tables import average, share

UPSTREAM = "task_arithmetic"
LANES = {"merged": 2.0, "featcal": 1.0, "expert": 0.0}  # from top to bottom
WORDS = {
    "merged": "merged model: from block to block its features drift away",
    "featcal": "calibrated model: solved block by block, towards the expert",
    "expert": "expert of one task: what the features should be",
}
HIGH, WIDE = 0.34, 0.62  # of a block, lanes and blocks


def picture(page: Page) -> PageOutput:
    """Blocks of the three models above each other, and below them the drift after every block,
    averaged over tasks.
    """
    return page.drawn(_figure(drift(page.evidence)), "FeatCal in one figure")


def drift(evidence: Evidence) -> pd.DataFrame:
    """Relative drift from the expert's features: a row per model, a column per block; empty where
    one was not measured.
    """
    rows = figures.drift_rows(evidence, "relative_drift")
    means = rows[~rows["block"].isin(INSIDE)].pivot_table(
        "relative_drift", "method", "block", "mean"
    )
    return means[sorted(means.columns, key=int)]


def _figure(measured: pd.DataFrame) -> Figure | None:
    if measured.empty:
        return None
    blocks = len(measured.columns)
    with figures.drawing():
        figure = Figure(figsize=(figures.WIDTH, 6.4), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        for model, height in LANES.items():
            _lane(above, model, height, blocks)
        for place in range(blocks):
            arrow = {
                "arrowstyle": "->",
                "color": COLOURS["featcal"],
                "lw": 1.8,
                "mutation_scale": 16,
            }
            above.annotate(
                "",
                (place, LANES["featcal"] - 0.04),
                (place, LANES["expert"] + HIGH + 0.02),
                arrowprops=arrow,
            )
        above.set(xlim=(-0.75, blocks - 0.35), ylim=(-0.5, 2.7))
        above.axis("off")
        for model in measured.index:
            look = {"color": COLOURS[model], "marker": MARKERS[model], "lw": 2, "markersize": 9}
            below.plot(
                range(blocks),
                measured.loc[model],
                label=NAMES[model] if model == "merged" else "calibrated",
                **look,
            )
        below.set_xticks(range(blocks), [str(place + 1) for place in range(blocks)])
        below.set(xlabel="after block", ylabel="relative drift (no unit)")
        below.set_ylim(0, None)
        below.legend()
        return figure


def _lane(axes: Axes, model: str, height: float, blocks: int) -> None:
    """One model: its blocks in a row, an arrow into each, and in words what happens to it."""
    look = {
        "facecolor": BARS[model]["color"],
        "edgecolor": BARS[model].get("edgecolor", INK),
        "hatch": BARS[model].get("hatch"),
    }
    onward = {"arrowstyle": "->", "color": INK}
    for place in range(blocks):
        axes.annotate(
            "",
            (place - WIDE / 2, height + HIGH / 2),
            (place - 0.72, height + HIGH / 2),
            arrowprops=onward,
        )
        corner, shape = (place - WIDE / 2, height), "round,pad=0,rounding_size=0.06"
        axes.add_patch(FancyBboxPatch(corner, WIDE, HIGH, boxstyle=shape, zorder=3, **look))
    axes.text(
        -0.7, height + (-0.34 if model == "expert" else HIGH + 0.08), WORDS[model], fontsize=11.5
    )


def outcome(page: Page) -> PageOutput:
    """What came of it in this suite: average accuracy of base, merged, calibrated and expert
    models, and the share of the gap.
    """
    evidence = page.evidence
    featcal = (UPSTREAM, "featcal", main_setting(page.suite))
    found = [
        average(evidence, key)
        for key in (("", "base", ""), (UPSTREAM, "merged", ""), featcal, ("", "expert", ""))
    ]
    if None in found:
        return PageOutput(note(f"○ not run: no scores in the {page.label}."))
    base, merged, ours, expert = (one.mean for one in found if one)
    way = "The merged model is no worse than the experts, so there is no way to go."
    if (went := share(merged, ours, expert)) is not None:
        way = f"FeatCal went {went:.0f} % of the way from the merged model to the experts."
    words = (
        f"Over {len(evidence.tasks)} tasks, right answers per hundred test {page.inputs}: {base:.1f} of the base before "
        f"fine-tuning, {expert:.1f} of the experts, each on its own task, {merged:.1f} of the one merged model, and {ours:.1f} "
        f"of that model after calibration. {way}"
    )
    return PageOutput(
        f'<div class="fc-card"><p><strong>Measured in the {page.label}.</strong> {words}</p></div>'
    )
