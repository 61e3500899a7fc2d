"""What calibration costs: Table 5 and its audit, Table 13, here and as printed.

Times come from run records: each was measured once, or once per seed, on the machine that is named
with it.
"""

import math
from collections.abc import Sequence

import pandas as pd

from reproduction.report.claims import main_setting
from reproduction.report.evidence import Evidence, select
from reproduction.report.html import PageOutput, fold, note, table
from reproduction.report.page import Page, label
from reproduction.report.paper import paper_table
from reproduction.report.statistics import estimate
from reproduction.report.studies import RIVALS

HEAD = ["Time (s)", "Speed-up over Surgery", "GPU energy (Wh)", "Peak host memory (MiB)"]
MEASURES = {"seconds": 1, "energy_wh": 2, "memory_mib": 0}  # decimals
PUBLISHED, KEPT = "as published", "features kept"
ROWS = {  # of Table 5: the paper's three in its order, then what the paper has no row for
    ("surgery", "each_step"): f"Surgery, {PUBLISHED}", ("prob_surgery", "each_step"): f"ProbSurgery, {PUBLISHED}",
    ("featcal", "once"): "FeatCal", ("surgery", "once"): f"Surgery, {KEPT}", ("prob_surgery", "once"): f"ProbSurgery, {KEPT}",
}  # fmt: skip
ORDER = ("surgery", "prob_surgery", "featcal")
Costs = dict[str, float]


def single(page: Page) -> PageOutput:
    """Table 5: every way to calibrate, each run once and alone; speed-ups relative to Surgery as
    published.
    """
    ours = page.evidence
    runs = select(ours.table("cost.run"), {"setting": main_setting(page.suite)})
    found = {
        name: _means(select(runs, {"method": m, "encode": e})) for (m, e), name in ROWS.items()
    }
    caption = f"One run each, alone on the machine, {page.inputs} read before the clock starts — {page.label}. Bold: best."
    return _costs(
        found,
        ROWS["surgery", "each_step"],
        caption,
        ours,
        "cost.run",
        _paper("table05", "seconds", "cpu_rss_gib"),
    )


def procedures(page: Page) -> PageOutput:
    """The abstract's cost by both procedures of the adapters: seconds and how many times FeatCal's,
    here and as printed.
    """
    runs = select(page.evidence.table("cost.run"), {"setting": main_setting(page.suite)})
    here = {
        (m, e): _means(select(runs, {"method": m, "encode": e})).get("seconds", math.nan)
        for m, e in ROWS
    }
    paper = paper_table("table05").set_index("method")["seconds"]
    there = {
        (m, e): float(paper[m]) if m == "featcal" or e == "each_step" else math.nan for m, e in ROWS
    }
    rows = []
    for key, name in ROWS.items():
        cells = [
            cell for found in (here, there) for cell in _times(found[key], found["featcal", "once"])
        ]
        rows.append(("", [name, *cells]))
    head = [
        "",
        "Seconds, here",
        "Times FeatCal’s, here",
        "Seconds, the paper",
        "Times FeatCal’s, the paper",
    ]
    caption = f"What one calibration with 256 {page.inputs} per task costs — {page.label}. One run each, at the main settings."
    return PageOutput(table(head, rows, caption, "fc-long"))


def _times(seconds: float, featcal: float) -> list[str]:
    """Seconds, and how many times FeatCal's."""
    if math.isnan(seconds):
        return ["–", "–"]
    return [
        f"{seconds:.1f}" if seconds < 100 else f"{seconds:.0f}",
        "–" if math.isnan(featcal) else f"{seconds / featcal:.1f}×",
    ]


def averages(page: Page) -> PageOutput:
    """Table 13: means over all numbers of images and seeds."""
    ours = page.evidence
    runs = select(ours.table("samples.run"), {"setting": main_setting(page.suite)})
    found = {ROWS[method, "once"]: _means(select(runs, {"method": method})) for method in ORDER}
    caption = f"Means over all numbers of {page.inputs} and seeds — {page.label}. Bold: best of the column."
    paper = _paper("table13", "stage_seconds", "peak_cpu_rss_gib")
    return _costs(found, ROWS["surgery", "once"], caption, ours, "samples.run", paper)


def _means(rows: pd.DataFrame) -> Costs:
    """Mean of every measure; NaN where it was not measured in all runs, nothing where nothing was
    run.
    """
    return (
        {}
        if rows.empty
        else {measure: float(rows[measure].mean(skipna=False)) for measure in MEASURES}
    )


def _costs(
    found: dict[str, Costs], relative_to: str, caption: str, ours: Evidence, kind: str, paper: str
) -> PageOutput:
    """A table of costs with the machine below it and the paper's one click away."""
    if not any(found.values()):
        return PageOutput(
            note(f"○ not run: no times in the results of the {label(ours.suite)}.") + paper
        )
    reference = found[relative_to].get("seconds", math.nan)
    rows = [
        ("", [name, *_cells(costs, list(found.values()), reference)])
        for name, costs in found.items()
    ]
    return PageOutput(
        table(["Method", *HEAD], rows, caption) + note(conditions(ours, kind)) + paper
    )


def _cells(costs: Costs, every: Sequence[Costs], reference: float) -> list[str]:
    if not costs:
        return ["not run", *["–"] * (len(HEAD) - 1)]
    cells = {}
    for measure, digits in MEASURES.items():
        best = min((other[measure] for other in every if other), default=math.nan)
        text = f"{costs[measure]:.{digits}f}"
        cells[measure] = (
            "not measured"
            if math.isnan(costs[measure])
            else f"<strong>{text}</strong>"
            if costs[measure] == best
            else text
        )
    return [
        cells["seconds"],
        f"{reference / costs['seconds']:.1f}×",
        cells["energy_wh"],
        cells["memory_mib"],
    ]


def conditions(ours: Evidence, kind: str) -> str:
    """Machine, threads and neighbours of the measured runs, as HTML."""
    record, energy = ours.record(kind), ours.table(kind)["energy_wh"]
    number = record.get("threads")
    threads = (
        "torch’s own number of threads"
        if number is None
        else f"{number} thread{'s' * (number != 1)}"
    )
    count = record.get("at_once", 1)
    beside = (
        "one run at a time"
        if count == 1
        else f"{count} runs side by side, so each was slowed by its neighbour"
    )
    gpu = "Energy is that of the GPU, power over time."
    if energy.isna().all():
        gpu = "Energy: no GPU was used, so none was measured."
    return f"Measured on {ours.machine(kind)}, {threads} in each process, {beside}. {gpu}"


def _paper(name: str, seconds: str, memory: str) -> str:
    """A printed table of costs, folded away; memory in GiB."""
    frame = paper_table(name).set_index("method")
    reference = frame.loc["surgery", seconds]
    rows = []
    for method in ORDER:
        row = frame.loc[method]
        cells = [
            f"{row[seconds]:g}",
            f"{reference / row[seconds]:.1f}×",
            f"{row['gpu_energy_wh']:.1f}",
            f"{row[memory]:.1f} GiB",
        ]
        rows.append(("", [RIVALS[method], *cells]))
    caption = f"The paper’s Table {int(name[-2:])}, as printed, speed-up computed: CLIP ViT-B/32 on an A800 GPU"
    return fold(
        "The paper’s own values", table(["Method", *HEAD[:-1], "Peak host memory"], rows, caption)
    )


def audit(page: Page) -> PageOutput:
    """Accuracy of the adapters as published after fewer steps than all."""
    ours = page.evidence
    rows = ours.table("cost")
    if rows.empty:
        return PageOutput(note(f"○ not run: no audit in the results of the {page.label}."))
    steps = sorted(rows["step"].unique())
    body = []
    for method in ORDER[:2]:
        values = {
            step: estimate(rows[(rows["method"] == method) & (rows["step"] == step)])
            for step in steps
        }
        body.append(
            (
                "",
                [
                    ROWS[method, "each_step"],
                    *(f"{v.mean:.1f}" if v else "–" for v in values.values()),
                ],
            )
        )
    caption = f"Average top-1 accuracy (%) on test {page.inputs} after so many steps of one training — {page.label}"
    return PageOutput(
        table(["Adapters", *(f"{step} steps" for step in steps)], body, caption, "fc-accuracy")
    )
