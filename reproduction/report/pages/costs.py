"""Tables 5 and 13: what calibration costs, here and as printed.

Times come from run records, each measured once, or once per seed, on the machine named with it.
"""

import math

import pandas as pd

from reproduction.report.claims import main_setting
from reproduction.report.evidence import Evidence, select
from reproduction.report.html import PageOutput, fold, note, table
from reproduction.report.pages.samples import ORDER, settings_note
from reproduction.report.paper import model_name, model_title, paper_table
from reproduction.report.statistics import estimate
from reproduction.report.tables import NAMES

HEAD = ["Time (s)", "Times FeatCal’s", "GPU energy (Wh)", "Peak host memory (MiB)"]
MEASURES = {"seconds": 1, "energy_wh": 2, "memory_mib": 0}  # decimals
ROWS = {  # of Table 5: the paper's three in its order, then what the paper has no row for
    ("surgery", "each_step"): "Surgery, as published", ("prob_surgery", "each_step"): "ProbSurgery, as published",
    ("featcal", "once"): "FeatCal", ("surgery", "once"): "Surgery, features kept",
    ("prob_surgery", "once"): "ProbSurgery, features kept",
}  # fmt: skip
FEATCAL = ("featcal", "once")
GIB = 1024.0
Costs = dict[str, float]


def times(*experiments: Evidence) -> PageOutput:
    """Return the time of each way to calibrate as a multiple of FeatCal's, printed and measured."""
    paper = paper_table("table05").set_index("method")["seconds"]
    printed = {(m, e): float(paper[m]) for m, e in ROWS if (m, e) == FEATCAL or e == "each_step"}
    columns = {"The paper, A800 GPU": printed}
    for ours in experiments:
        found = {key: costs.get("seconds", math.nan) for key, costs in _single(ours).items()}
        columns[f"{model_title(ours.role, ours.suite)}, CPU"] = found
    rows = [
        ("", [name, *(_times(found, key) for found in columns.values())])
        for key, name in ROWS.items()
    ]
    caption = "Time of one calibration as a multiple of FeatCal’s; one run each"
    return PageOutput(table(["", *columns], rows, caption))


def _times(found: dict[tuple[str, str], float], key: tuple[str, str]) -> str:
    seconds, featcal = found.get(key, math.nan), found.get(FEATCAL, math.nan)
    if math.isnan(seconds / featcal):
        return "–"
    return f"{seconds / featcal:.1f}× <small>{seconds:.3g} s</small>"


def single(ours: Evidence) -> PageOutput:
    """Return Table 5: every way to calibrate, each run once and alone."""
    caption = (
        f"One run each, alone on the machine — {model_name(ours.role, ours.suite)}. Bold: lowest."
    )
    labels = {key: name + settings_note(ours, "cost", key[0]) for key, name in ROWS.items()}
    found = {labels[key]: costs for key, costs in _single(ours).items()}
    return _costs(found, labels[FEATCAL], caption, ours, "cost.run")


def _single(ours: Evidence) -> dict[tuple[str, str], Costs]:
    runs = select(ours.table("cost.run"), {"setting": main_setting(ours.suite)})
    return {(m, e): _means(select(runs, {"method": m, "encode": e})) for m, e in ROWS}


def averages(ours: Evidence) -> PageOutput:
    """Return Table 13: means over all numbers of samples and seeds."""
    runs = select(ours.table("samples.run"), {"setting": main_setting(ours.suite)})
    labels = {m: ROWS[m, "once"] + settings_note(ours, "samples", m) for m in ORDER}
    found = {labels[m]: _means(select(runs, {"method": m})) for m in ORDER}
    name = model_name(ours.role, ours.suite)
    caption = f"Means over all numbers of {ours.inputs} and seeds — {name}. Bold: lowest."
    return _costs(found, labels["featcal"], caption, ours, "samples.run")


def _means(rows: pd.DataFrame) -> Costs:
    """Return the mean of every measure, NaN where not measured in all runs; nothing if not run."""
    if rows.empty:
        return {}
    return {measure: float(rows[measure].mean(skipna=False)) for measure in MEASURES}


def _costs(
    found: dict[str, Costs], relative_to: str, caption: str, ours: Evidence, kind: str
) -> PageOutput:
    """Return a table of costs with the machine below it."""
    if not any(found.values()):
        return PageOutput(note(f"○ not run: no times — {model_name(ours.role, ours.suite)}."))
    reference = found[relative_to].get("seconds", math.nan)
    several = [costs for costs in found.values() if costs]
    rows = [("", [name, *_cells(costs, several, reference)]) for name, costs in found.items()]
    return PageOutput(table(["Method", *HEAD], rows, caption) + note(conditions(ours, kind)))


def _cells(costs: Costs, every: list[Costs], reference: float) -> list[str]:
    if not costs:
        return ["not run", *["–"] * (len(HEAD) - 1)]
    cells = {}
    for measure, digits in MEASURES.items():
        text = f"{costs[measure]:.{digits}f}"
        best = costs[measure] == min(other[measure] for other in every)
        missing = math.isnan(costs[measure])
        cells[measure] = "not measured" if missing else f"<strong>{text}</strong>" if best else text
    ratio = costs["seconds"] / reference
    return [
        cells["seconds"],
        "–" if math.isnan(ratio) else f"{ratio:.1f}×",
        cells["energy_wh"],
        cells["memory_mib"],
    ]


def conditions(ours: Evidence, kind: str) -> str:
    """Return machine, threads and neighbours of the measured runs."""
    record = ours.record(kind)
    threads, beside = record.get("threads"), record.get("at_once", 1)
    energy = " Energy: not measured, no GPU." if ours.table(kind)["energy_wh"].isna().all() else ""
    return (
        f"Machine: {ours.machine(kind)}; threads per process: {threads or 'torch’s default'};"
        f" runs at the same time: {beside}.{energy}"
    )


def printed(name: str) -> PageOutput:
    """Return a printed table of costs, one click away; memory in MiB as ours."""
    seconds, memory = {
        "table05": ("seconds", "cpu_rss_gib"), "table13": ("stage_seconds", "peak_cpu_rss_gib"),
    }[name]  # fmt: skip
    frame = paper_table(name).set_index("method")
    rows = []
    for method in ORDER:
        row = frame.loc[method]
        cells = [f"{row[seconds]:g}", f"{row[seconds] / frame.loc['featcal', seconds]:.1f}×"]
        cells += [f"{row['gpu_energy_wh']:.1f}", f"{row[memory] * GIB:.0f}"]
        rows.append(("", [NAMES[method], *cells]))
    caption = f"The paper’s Table {int(name[-2:])}, as printed, memory from GiB: CLIP-ViT-B/32 on an A800 GPU"
    return PageOutput(fold("The paper’s own values", table(["Method", *HEAD], rows, caption)))


def audit(*experiments: Evidence) -> PageOutput:
    """Return the accuracy of the adapters as published after fewer steps than all."""
    steps = sorted({step for ours in experiments for step in ours.table("cost")["step"]})
    if not steps:
        return PageOutput(note("○ not run: no scores of adapters after fewer steps."))
    body = []
    for ours in experiments:
        for method in ORDER[:2]:
            rows = select(ours.table("cost"), {"method": method})
            found = [estimate(rows[rows["step"] == step]) for step in steps]
            label = f"{NAMES[method]} <small>{model_name(ours.role, ours.suite)}</small>"
            body.append(("", [label, *(f"{v.mean:.1f}" if v else "–" for v in found)]))
    caption = "Average top-1 accuracy (%) of the adapters as published after so many steps"
    head = ["Adapter", *(f"{step} steps" for step in steps)]
    return PageOutput(table(head, body, caption, "fc-accuracy"))
