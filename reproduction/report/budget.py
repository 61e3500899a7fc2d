"""Accuracy against the number of images per task: Table 12 and Figure 3, here and as printed."""

import pandas as pd
from matplotlib.figure import Figure

from reproduction.report.claims import main_setting
from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import COLOURS, CURVES, one_panel
from reproduction.report.html import PageOutput, fold, note, table
from reproduction.report.page import Page
from reproduction.report.paper import paper_table
from reproduction.report.statistics import difference, estimate
from reproduction.report.studies import RIVALS
from reproduction.report.tables import Cell, average, number

ORDER = ("surgery", "prob_surgery", "featcal")  # of the paper's rows
UPSTREAM = "task_arithmetic"
DASHES = {"featcal": "-", "surgery": "--", "prob_surgery": "-."}


def measured(ours: Evidence) -> pd.DataFrame:
    """Average accuracy (%) of every method and number of images, and its deviation over seeds, nan
    for one; maybe no rows.
    """
    rows = select(
        ours.table("samples"), {"upstream": UPSTREAM, "setting": main_setting(ours.suite)}
    )
    groups = rows[rows["method"].isin(ORDER)].groupby(["method", "samples"])
    found = [(*key, one.mean, one.spread) for key, own in groups if (one := estimate(own))]
    return pd.DataFrame(found, columns=["method", "samples", "mean", "sd"]).astype({"sd": float})


def printed() -> pd.DataFrame:
    """The paper's Table 12, alike."""
    return paper_table("table12").rename(columns={"samples_per_task": "samples", "std": "sd"})


def merged_level(ours: Evidence) -> float | None:
    """Average accuracy of the merged model that all start from."""
    value = average(ours, (UPSTREAM, "merged", ""), "samples")
    return None if value is None else value.mean


def means(page: Page) -> PageOutput:
    """Table 12: mean and standard deviation over seeds, the best of every column in bold; then the
    paper's, one click away.
    """
    ours = page.evidence
    found, level = measured(ours), merged_level(ours)
    paper = fold(
        "The paper’s own values",
        _table(printed(), "The paper’s Table 12, as printed: real CLIP models on real data"),
    )
    if found.empty:
        return PageOutput(note(f"○ not run: no results of this study in the {page.label}.") + paper)
    caption = f"Average top-1 accuracy (%) on test {page.inputs} by {page.inputs} per task, sd over seeds — {page.label}. Bold: best."
    remarks = (
        []
        if level is None
        else [f"Where all start: {UPSTREAM.replace('_', ' ')} alone, {level:.1f} %."]
    )
    remarks += [*more(ours), *spreads(found), *short(ours)]
    return PageOutput(
        _table(found, caption) + note(" ".join(remarks)) + page.against_printed() + paper
    )


def _table(found: pd.DataFrame, caption: str) -> str:
    best = {
        samples: max(round(mean, 1) for mean in own)
        for samples, own in found.groupby("samples")["mean"]
    }
    cells = {}
    for one in found.itertuples():
        spread = one.sd if one.sd == one.sd else None
        cells[one.method, one.samples] = Cell(
            one.mean, spread, best=round(one.mean, 1) == best[one.samples]
        )
    rows = [
        ("", [f"w/ {RIVALS[method]}", *(number(cells.get((method, n)), []) for n in best)])
        for method in ORDER
    ]
    return table(["Task Arithmetic", *(f"n = {n}" for n in best)], rows, caption, "fc-accuracy")


def more(ours: Evidence) -> list[str]:
    """A sentence on what the most images add to FeatCal's average over the fewest."""
    rows = select(
        ours.table("samples"),
        {"upstream": UPSTREAM, "setting": main_setting(ours.suite), "method": "featcal"},
    )
    few, many = (
        estimate(rows[rows["samples"] == n]) for n in (rows["samples"].min(), rows["samples"].max())
    )
    if few is None or many is None or few == many:
        return []
    added = difference([(1.0, many), (-1.0, few)])
    ends = f"From n = {rows['samples'].min()} to n = {rows['samples'].max()}"
    return [
        f"{ends}, {RIVALS['featcal']} changes by {added.value:+.1f} points (two standard errors: {added.noise:.1f})."
    ]


def spreads(found: pd.DataFrame) -> list[str]:
    """A sentence on where seeds matter most, and where least."""
    drawn = found.dropna(subset="sd").sort_values("sd")
    if drawn.empty:
        return []
    ends = (
        f"{RIVALS[one.method]} at n = {one.samples} (sd {one.sd:.1f})"
        for one in (drawn.iloc[-1], drawn.iloc[0])
    )
    return [f"Seeds matter most to {' and least to '.join(ends)}."]


def short(ours: Evidence) -> list[str]:
    """A sentence for every number of images that a split does not have."""
    runs = ours.table("samples.run")
    fewer = runs[runs["images"] < runs["samples"]] if len(runs) else runs
    told = []
    for (samples, images), rows in fewer.groupby(["samples", "images"]):
        who = " and ".join(RIVALS[method] for method in ORDER if method in set(rows["method"]))
        told.append(
            f"At n = {samples}, {who} saw {images} images of each task: their split has no more."
        )
    return told


def figure(page: Page) -> PageOutput:
    """Figure 3, or a note that it was not run."""
    return page.drawn(curves(page.evidence, page.inputs), f"accuracy by {page.inputs} per task")


def curves(ours: Evidence, inputs: str = "images") -> Figure | None:
    """Mean over seeds with one standard deviation up and down; the merged model's level as a
    line.
    """
    points, level = measured(ours), merged_level(ours)
    if points.empty:
        return None
    budgets = sorted(points["samples"].unique())
    with one_panel(4.4) as (figure, axes):
        for method, dashes in DASHES.items():
            own, look = (
                points[points["method"] == method],
                CURVES[method] | {"linestyle": dashes, "lw": 2, "ms": 8, "capsize": 4},
            )
            axes.errorbar(own["samples"], own["mean"], yerr=own["sd"].fillna(0.0), **look)
        if level is not None:
            axes.axhline(
                level,
                color=COLOURS["merged"],
                lw=1.6,
                linestyle=":",
                label="merged, not calibrated",
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(budgets, [str(n) for n in budgets])
        axes.minorticks_off()
        axes.set(xlabel=f"{inputs} per task, n (logarithmic)", ylabel="average accuracy (%)")
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, -0.18),
            ncols=2,
            handlelength=2.6,
            columnspacing=1.2,
        )
        return figure
