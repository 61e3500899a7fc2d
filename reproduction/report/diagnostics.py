"""Figures 2 and 7: FeatCal against an adapter by cosine of final features, and task vectors before
and after calibration.

The two figures differ in the adapter that FeatCal is held against; models are those of the suite's
main settings.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from reproduction.report.claims import main_setting
from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import COLOURS, MARKERS, NAMES, named, one_panel, specks
from reproduction.report.gains import gains
from reproduction.report.html import PageOutput, estimated, fold, note, table
from reproduction.report.page import Page, label
from reproduction.report.paper import SIZES
from reproduction.report.statistics import estimate
from reproduction.report.tables import MERGERS, SETTING_LABELS

RIVALS = {"figure2": "surgery", "figure7": "prob_surgery"}
UPSTREAM = "task_arithmetic"
MEAN = "mean"


def model(evidence: Evidence, method: str) -> dict[str, str]:
    """The column values that name one model: adapters and FeatCal at the suite's main settings."""
    setting = "" if method == "merged" else main_setting(evidence.suite)
    return {"upstream": UPSTREAM, "method": method, "setting": setting}


def alignment(evidence: Evidence, rival: str) -> Figure | None:
    """Mean cosine of final features to the expert's, by task and over tasks: merged, rival,
    FeatCal.
    """
    methods = ("merged", rival, "featcal")
    return _cosines(
        evidence,
        evidence.table("alignment"),
        methods,
        "mean cosine to the expert’s features (no unit)",
    )


def vectors(evidence: Evidence, rival: str) -> Figure | None:
    """Cosine of a model's change from the base to its expert's, before and after calibration; the
    adapter changes no weight.
    """
    rows = select(evidence.table("vectors"), {"part": "backbone"})
    return _cosines(
        evidence, rows, ("merged", "featcal"), "cosine of task vectors (no unit)", zero=True
    )


def _cosines(
    evidence: Evidence,
    measured: pd.DataFrame,
    methods: Sequence[str],
    words: str,
    zero: bool = False,
) -> Figure | None:
    """Dots by task from top to bottom, the mean set apart below them; None where a model was not
    measured.
    """
    found = {method: select(measured, model(evidence, method)) for method in methods}
    if any(rows.empty for rows in found.values()):
        return None
    names = [*map(evidence.title, evidence.tasks), MEAN]
    with one_panel(0.42 * len(evidence.tasks) + 2.2) as (figure, axes):
        for method, rows in found.items():
            values = rows.set_index("task")["cosine"]
            look: dict[str, Any] = {
                "marker": MARKERS[method],
                "color": COLOURS[method],
                "label": NAMES[method],
                "s": 80,
            }
            dots = [*(values[task] for task in evidence.tasks), values.mean()]
            axes.scatter(dots, range(len(names)), zorder=3, edgecolor="white", lw=0.6, **look)
        if zero:
            axes.axvline(0, color=COLOURS["expert"], lw=1)
        axes.set_yticks(range(len(names)), names)
        axes.axhline(len(names) - 1.5, color=COLOURS["base"], lw=1)
        axes.invert_yaxis()
        axes.set_xlabel(words)
        axes.legend(
            loc="lower center",
            bbox_to_anchor=(0.4, 1.0),
            ncols=3,
            handletextpad=0.2,
            columnspacing=1.2,
        )
        return figure


def images(evidence: Evidence, rival: str) -> Figure | None:
    """Every image of the shown task: its cosine with the rival across, with FeatCal upwards, and
    the line where both agree.
    """
    pair = [
        select(
            evidence.table("similarity"),
            {k: v for k, v in model(evidence, m).items() if k != "upstream"},
        ).set_index("index")
        for m in (rival, "featcal")
    ]
    if any(rows.empty for rows in pair):
        return None
    across, up = (rows["similarity"] for rows in pair)
    with one_panel(4.9) as (figure, axes):
        specks(axes, across, up[across.index], 4, edgecolor=COLOURS["featcal"], alpha=0.4)
        low, high = min(across.min(), up.min()), max(across.max(), up.max())
        axes.plot([low, high], [low, high], color=COLOURS["expert"], lw=1.2, ls="--")
        mean: dict[str, Any] = {
            "marker": "+",
            "s": 260,
            "color": "black",
            "lw": 2.4,
            "zorder": 4,
            "label": "mean",
        }
        axes.scatter(across.mean(), up.mean(), **mean)
        above = int((up[across.index] > across).sum())
        axes.set_title(f"{evidence.title(evidence.shown)}: {above} of {len(across)} above the line")
        axes.set(
            xlabel=f"cosine with {NAMES[rival]} (no unit)", ylabel="cosine with FeatCal (no unit)"
        )
        axes.legend()
        return figure


def both_gains(evidence: Evidence, rival: str) -> Figure | None:
    """Gain in cosine against gain in accuracy over the rival, a mark per task; bars are two
    standard errors.
    """
    found = gains(evidence, model(evidence, "featcal"), model(evidence, rival))
    if found.empty:
        return None
    with one_panel(4.9) as (figure, axes):
        axes.axhline(0, color=COLOURS["expert"], lw=1)
        axes.axvline(0, color=COLOURS["expert"], lw=1)
        bars = {
            "xerr": found["cosine_noise"],
            "yerr": found["accuracy_noise"],
            "elinewidth": 0.8,
            "ecolor": "#999999",
        }
        axes.errorbar(
            found["cosine"],
            found["accuracy"],
            fmt=MARKERS["featcal"],
            ms=9,
            color=COLOURS["featcal"],
            **bars,
        )
        axes.margins(x=0.18, y=0.1)
        named(
            axes,
            {evidence.title(row.task): (row.cosine, row.accuracy) for row in found.itertuples()},
        )
        words = f"FeatCal minus {NAMES[rival]}"
        axes.set(xlabel=f"gain in cosine, {words} (no unit)", ylabel="gain in accuracy (points)")
        return figure


PANELS: dict[str, Callable[[Evidence, str], Figure | None]] = {
    "alignment": alignment, "images": images, "gains": both_gains, "vectors": vectors,
}  # fmt: skip


def summary(suite: str) -> PageOutput:
    """Both sizes, every setting that was measured: accuracy, cosine of final features, and of task
    vectors, one click away.
    """
    bodies = [_all_models(Evidence(suite, role, "8"), size) for role, size in SIZES.items()]
    return PageOutput(
        fold("All models in numbers, at both settings and for the larger model", "".join(bodies))
    )


def _all_models(evidence: Evidence, size: str) -> str:
    """One row per model that was measured: means over tasks."""
    found = evidence.table("alignment")
    rows = []
    for method, setting, seed in (
        found[["method", "setting", "seed"]].drop_duplicates().itertuples(index=False)
    ):
        one = {"upstream": UPSTREAM, "method": method, "setting": setting}
        accuracy = estimate(select(evidence.table("scores"), one | {"seed": seed}))
        moved = select(evidence.table("vectors"), one)
        parts = [select(moved, {"part": part}) for part in ("backbone", "linear")]
        cells = [
            f"{part['cosine'].mean():.3f}<small>length {part['size'].mean():.1f}</small>"
            for part in parts
            if len(part)
        ]
        words = f"w/ {NAMES[method]}, {SETTING_LABELS[setting]}" if setting else MERGERS[UPSTREAM]
        cosine = f"{select(found, one)['cosine'].mean():.3f}"
        rows.append(("", [words, estimated(accuracy), cosine, *(cells or ["as merged"] * 2)]))
    if not rows:
        return note(f"○ not run: the {size}.")
    head = [
        "",
        "Accuracy (%)",
        "Cosine of final features",
        "Cosine of task vectors",
        "… of the blocks’ linears only",
    ]
    legend = "Length: of the change from the base, as a multiple of the expert’s."
    return table(
        head, rows, f"Means over tasks, {size}, one seed — {label(evidence.suite)}. {legend}"
    )


def figure(panel: str, page: Page) -> PageOutput:
    """One panel of Figure 2 or 7, or a note that it was not run."""
    return page.drawn(PANELS[panel](page.evidence, RIVALS[page.name]), panel)
