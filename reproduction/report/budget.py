"""Accuracy against the number of images per task: Table 12 and Figure 3, here and as printed."""

from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from reproduction.report.claims import main_setting
from reproduction.report.estimate import difference, estimate
from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import COLOURS, CURVES, one_panel
from reproduction.report.markup import PageOutput, fold, note, table
from reproduction.report.pages import Page
from reproduction.report.studies import RIVALS
from reproduction.report.tables import average
from reproduction.report.values import paper_table

ORDER = ("surgery", "prob_surgery", "featcal")  # of the paper's rows
UPSTREAM = "task_arithmetic"
DASHES = {"featcal": "-", "surgery": "--", "prob_surgery": "-."}


@dataclass(frozen=True)
class Point:
    """Average accuracy of one method at one number of images, in percent.   sd: over seeds; None for one seed."""

    method: str
    samples: int
    mean: float
    sd: float | None


def measured(ours: Evidence) -> list[Point]:
    """Every method and number of images, in the paper's order; empty where nothing was run."""
    rows, found = select(ours.table("samples"), {"upstream": UPSTREAM, "setting": main_setting(ours.suite)}), []
    for method in ORDER:
        own = rows[rows["method"] == method]
        for samples in sorted(own["samples"].unique()):
            value = estimate(own[own["samples"] == samples])
            assert value is not None  # there is at least one row
            found.append(Point(method, int(samples), value.mean, value.spread))
    return found


def printed() -> list[Point]:
    """The paper's Table 12."""
    frame = paper_table("table12")
    columns = zip(frame["method"], frame["samples_per_task"], frame["mean"], frame["std"], strict=True)
    return [Point(str(method), int(samples), float(mean), float(sd)) for method, samples, mean, sd in columns]


def merged_level(ours: Evidence) -> float | None:
    """Average accuracy of the merged model that all start from."""
    value = average(ours, (UPSTREAM, "merged", ""), "samples")
    return None if value is None else value.mean


def means(page: Page) -> PageOutput:
    """Table 12: mean and standard deviation over seeds, the best of every column in bold; then the paper's, one click away."""
    ours = page.evidence
    found, level = measured(ours), merged_level(ours)
    paper = fold("The paper’s own values", _table(printed(), "The paper’s Table 12, as printed: real CLIP models on real data"))
    if not found:
        return PageOutput(note(f"○ not run: no results of this study in the {page.label}.") + paper)
    caption = (
        f"Average top-1 accuracy (%) on test {page.inputs} by {page.inputs} per task, sd over seeds — {page.label}. Bold: best."
    )
    remarks = [] if level is None else [f"Where all start: {UPSTREAM.replace('_', ' ')} alone, {level:.1f} %."]
    remarks += [*more(ours), *spreads(found), *short(ours)]
    return PageOutput(_table(found, caption) + note(" ".join(remarks)) + page.against_printed() + paper)


def _table(points: list[Point], caption: str) -> str:
    budgets = sorted({point.samples for point in points})
    best = {n: max(round(p.mean, 1) for p in points if p.samples == n) for n in budgets}
    rows = []
    for method in ORDER:
        cells = {point.samples: point for point in points if point.method == method}
        rows.append(("", [f"w/ {RIVALS[method]}", *(_cell(cells[n], best[n]) if n in cells else "–" for n in budgets)]))
    return table(["Task Arithmetic", *(f"n = {n}" for n in budgets)], rows, caption, "fc-accuracy")


def _cell(point: Point, best: float) -> str:
    mean = f"{point.mean:.1f}"
    value = f"<strong>{mean}</strong>" if round(point.mean, 1) == best else mean
    return value if point.sd is None else f"{value}<small>sd&nbsp;{point.sd:.1f}</small>"


def more(ours: Evidence) -> list[str]:
    """A sentence on what the most images add to FeatCal's average over the fewest."""
    rows = select(ours.table("samples"), {"upstream": UPSTREAM, "setting": main_setting(ours.suite), "method": "featcal"})
    few, many = (estimate(rows[rows["samples"] == n]) for n in (rows["samples"].min(), rows["samples"].max()))
    if few is None or many is None or few == many:
        return []
    added = difference([(1.0, many), (-1.0, few)])
    ends = f"From n = {rows['samples'].min()} to n = {rows['samples'].max()}"
    return [f"{ends}, {RIVALS['featcal']} changes by {added.value:+.1f} points (two standard errors: {added.noise:.1f})."]


def spreads(found: list[Point]) -> list[str]:
    """A sentence on where seeds matter most, and where least."""
    with_sd = [(point.sd, point) for point in found if point.sd is not None]
    if not with_sd:
        return []
    (most, wide), (least, narrow) = max(with_sd, key=lambda p: p[0]), min(with_sd, key=lambda p: p[0])
    ends = f"{RIVALS[wide.method]} at n = {wide.samples} (sd {most:.1f}), {RIVALS[narrow.method]} at n = {narrow.samples}"
    return [f"Seeds matter most to {ends.replace(', ', ' and least to ', 1)} (sd {least:.1f})."]


def short(ours: Evidence) -> list[str]:
    """A sentence for every number of images that a split does not have."""
    runs = ours.table("samples.run")
    fewer = runs[runs["images"] < runs["samples"]] if len(runs) else runs
    told = []
    for (samples, images), rows in fewer.groupby(["samples", "images"]):
        who = " and ".join(RIVALS[method] for method in ORDER if method in set(rows["method"]))
        told.append(f"At n = {samples}, {who} saw {images} images of each task: their split has no more.")
    return told


def figure(page: Page) -> PageOutput:
    """Figure 3, or a note that it was not run."""
    return page.drawn(curves(page.evidence, page.inputs), f"accuracy by {page.inputs} per task")


def curves(ours: Evidence, inputs: str = "images") -> Figure | None:
    """Mean over seeds with one standard deviation up and down; the merged model's level as a line."""
    points, level = pd.DataFrame([vars(point) for point in measured(ours)]), merged_level(ours)
    if points.empty:
        return None
    budgets = sorted(points["samples"].unique())
    with one_panel(4.4) as (figure, axes):
        for method, dashes in DASHES.items():
            own, look = points[points["method"] == method], {"linestyle": dashes, "lw": 2, "ms": 8, "capsize": 4}
            axes.errorbar(own["samples"], own["mean"], yerr=own["sd"].fillna(0.0), **CURVES[method], **look)
        if level is not None:
            axes.axhline(level, color=COLOURS["merged"], lw=1.6, linestyle=":", label="merged, not calibrated")
        axes.set_xscale("log", base=2)
        axes.set_xticks(budgets, [str(n) for n in budgets])
        axes.minorticks_off()
        axes.set(xlabel=f"{inputs} per task, n (logarithmic)", ylabel="average accuracy (%)")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, handlelength=2.6, columnspacing=1.2)
        return figure
