"""Tables 5, 12 and 13 and Figure 3: what calibration costs in samples, time, energy and memory.

Times come from run records, each measured once, or once per seed, on the machine named with it.
"""

import math
from itertools import product

import pandas as pd

from reproduction.report.claims import studied_setting
from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import COLOURS, CURVES, legend, one_panel, shown
from reproduction.report.html import PageOutput, compact, fold, listed, margin, note, table
from reproduction.report.pages import reproduced
from reproduction.report.paper import model_name, model_title, paper_table
from reproduction.report.statistics import Estimate, estimate, highest
from reproduction.report.tables import METHODS, NAMES, SYMBOLS, Cell, average, number

ORDER = ("surgery", "prob_surgery", "featcal")  # of the paper's rows
UPSTREAM = "task_arithmetic"
DASHES = {"featcal": "-", "surgery": "--", "prob_surgery": "-."}
SIZES = {"surgery": "rank", "prob_surgery": "hidden"}  # what an adapter's size is called


def settings_note(ours: Evidence, study: str, method: str) -> str:
    """Return a method's settings in a study, for the label of its row."""
    record = ours.record(study).get("settings") or ours.settings(study).get("study", {})
    values = record.get("rivals", {}).get(method)
    if not values:
        return ""
    if method in SIZES:
        return f" <small>{SIZES[method]} {values[SIZES[method]]}, {values['steps']} steps</small>"
    said = ", ".join(f"{s} {compact(values[k])}" for k, s in SYMBOLS.items() if k in values)
    return f" <small>{said}</small>"


def answer(*experiments: Evidence) -> PageOutput:
    """Return FeatCal with the fewest samples against the merger, the most, and the adapters."""
    rows = []
    for ours in experiments:
        name, budgets = model_title(ours.role, ours.suite), set(_rows(ours, "featcal")["samples"])
        if not budgets:
            rows.append([name, *["not run"] * 4])
            continue
        few, many = min(budgets), max(budgets)
        ends = {n: _at(ours, "featcal", n) for n in (few, many)}
        merged = average(ours, (UPSTREAM, "merged", ""), "samples")
        cells = [margin(ends[few], merged), margin(ends[many], ends[few])]
        cells += [
            margin(one, highest(_at(ours, m, n) for m in ORDER[:2])) for n, one in ends.items()
        ]
        rows.append([f"{name} <small>{few} and {many} per task</small>", *cells])
    head = ["FeatCal", "Fewest − merger", "Most − fewest", "− better adapter, fewest"]
    caption = "Differences of the average accuracy, points. Above, below: by more than two SE."
    return listed([*head, "− better adapter, most"], rows, caption, "fc-long")


def _rows(ours: Evidence, method: str) -> pd.DataFrame:
    key = {"upstream": UPSTREAM, "setting": studied_setting(ours.suite), "method": method}
    return select(ours.table("samples"), key)


def _at(ours: Evidence, method: str, samples: int) -> Estimate | None:
    return estimate(select(_rows(ours, method), {"samples": samples}))


def measured(ours: Evidence) -> pd.DataFrame:
    """Return average accuracy (%) of every method and number of samples, and its deviation."""
    groups = ((m, n, own) for m in ORDER for n, own in _rows(ours, m).groupby("samples"))
    found = [(m, n, one.mean, one.spread) for m, n, own in groups if (one := estimate(own))]
    return pd.DataFrame(found, columns=["method", "samples", "mean", "sd"]).astype({"sd": float})


def means(ours: Evidence) -> PageOutput:
    """Return Table 12: mean and standard deviation over seeds, the best of a column in bold."""
    found = measured(ours)
    name = model_name(ours.role, ours.suite)
    if found.empty:
        return PageOutput(note(f"○ not run: accuracy by number of samples — {name}."))
    merged = average(ours, (UPSTREAM, "merged", ""), "samples")
    start = f" Task arithmetic alone: {merged.mean:.1f}." if merged else ""
    caption = f"Average top-1 accuracy (%) by {ours.inputs} per task, sd over seeds — {name}.{start} Bold: best."
    labels = {m: METHODS[m] + settings_note(ours, "samples", m) for m in ORDER}
    html = _table(found, labels, caption) + _short(ours)
    if ours.suite == reproduced.SUITE:
        html += reproduced.shown(list(compared(ours)), "table12")
    return PageOutput(html)


def printed_means() -> PageOutput:
    """Return the paper's Table 12, one click away."""
    found = paper_table("table12").rename(columns={"samples_per_task": "samples", "std": "sd"})
    caption = "The paper’s Table 12, as printed: CLIP-ViT-B/32"
    return PageOutput(fold("The paper’s own values", _table(found, METHODS, caption)))


def _table(found: pd.DataFrame, labels: dict[str, str], caption: str) -> str:
    best = found["mean"].round(1).groupby(found["samples"]).max()
    cells = {}
    for one in found.itertuples():
        spread = one.sd if one.sd == one.sd else None
        highest = round(one.mean, 1) == best[one.samples]
        cells[one.method, one.samples] = Cell(one.mean, spread, best=highest)
    rows = [[labels[m], *(number(cells.get((m, n)), []) for n in best.index)] for m in ORDER]
    head = ["Task Arithmetic", *(f"n = {n}" for n in best.index)]
    return table(head, rows, caption, "fc-accuracy")


def _short(ours: Evidence) -> str:
    """Return a note of splits that have fewer samples than a column asks for."""
    runs = ours.table("samples.run")
    fewer = runs[runs["images"] < runs["samples"]][["samples", "images"]].drop_duplicates()
    counts = ", ".join(f"n = {n}: {has}" for n, has in fewer.itertuples(index=False))
    said = f"Largest split of some methods, {ours.inputs} per task: {counts}."
    return note(said) if counts else ""


def compared(ours: Evidence) -> list[reproduced.Compared]:
    """Return our value for every cell of Table 12, whose deviations over three seeds it prints."""
    cells = []
    for _, cell in paper_table("table12").iterrows():
        method, n = cell["method"], cell["samples_per_task"]
        key = {"upstream": UPSTREAM, "method": method, "setting": reproduced.SETTING, "samples": n}
        value = estimate(select(ours.table("samples"), key))
        if value is not None:
            both = {"printed": float(cell["mean"]), "spread": float(cell["std"]), "seeds": 3}
            cells.append(reproduced.Compared(METHODS[method], f"n = {n}", value, **both))
    return cells


def curves(ours: Evidence) -> PageOutput:
    """Return Figure 3: mean over seeds with one standard deviation up and down."""
    what, points = f"accuracy by number of {ours.inputs}", measured(ours)
    if points.empty:
        return shown(None, what)
    budgets = sorted(points["samples"].unique())
    with one_panel(4.4) as (figure, axes):
        for method, dashes in DASHES.items():
            own = points[points["method"] == method]
            look = CURVES[method] | {"linestyle": dashes, "lw": 2, "ms": 8, "capsize": 4}
            axes.errorbar(own["samples"], own["mean"], yerr=own["sd"].fillna(0.0), **look)
        merged = average(ours, (UPSTREAM, "merged", ""), "samples")
        if merged is not None:
            look = {"color": COLOURS["merged"], "lw": 1.6, "linestyle": ":"}
            axes.axhline(merged.mean, label="merged, not calibrated", **look)
        axes.set_xscale("log", base=2)
        axes.set_xticks(budgets, [str(n) for n in budgets])
        axes.minorticks_off()
        axes.set(xlabel=f"{ours.inputs} per task, n (logarithmic)", ylabel="average accuracy (%)")
        legend(axes, 2, below=True, handlelength=2.6)
        return shown(figure, what)


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
    rows = [[name, *(_times(own, key) for own in columns.values())] for key, name in ROWS.items()]
    caption = "Time of one calibration as a multiple of FeatCal’s; one run each"
    return listed(["", *columns], rows, caption)


def _times(found: dict[tuple[str, str], float], key: tuple[str, str]) -> str:
    seconds, featcal = found.get(key, math.nan), found.get(FEATCAL, math.nan)
    if math.isnan(seconds / featcal):
        return "–"
    return f"{seconds / featcal:.1f}× <small>{seconds:.3g} s</small>"


def single(ours: Evidence) -> PageOutput:
    """Return Table 5: every way to calibrate, each run once and alone."""
    labels = {key: name + settings_note(ours, "cost", key[0]) for key, name in ROWS.items()}
    found = {labels[key]: costs for key, costs in _single(ours).items()}
    return _costs(found, labels[FEATCAL], "One run each, alone on the machine", ours, "cost.run")


def _single(ours: Evidence) -> dict[tuple[str, str], Costs]:
    runs = select(ours.table("cost.run"), {"setting": studied_setting(ours.suite)})
    return {(m, e): _means(select(runs, {"method": m, "encode": e})) for m, e in ROWS}


def averages(ours: Evidence) -> PageOutput:
    """Return Table 13: means over all numbers of samples and seeds."""
    runs = select(ours.table("samples.run"), {"setting": studied_setting(ours.suite)})
    labels = {m: ROWS[m, "once"] + settings_note(ours, "samples", m) for m in ORDER}
    found = {labels[m]: _means(select(runs, {"method": m})) for m in ORDER}
    about = f"Means over all numbers of {ours.inputs} and seeds"
    return _costs(found, labels["featcal"], about, ours, "samples.run")


def _means(rows: pd.DataFrame) -> Costs:
    """Return the mean of every measure, NaN where not measured in all runs; nothing if not run."""
    return {} if rows.empty else {m: float(rows[m].mean(skipna=False)) for m in MEASURES}


def _costs(
    found: dict[str, Costs], relative_to: str, about: str, ours: Evidence, kind: str
) -> PageOutput:
    """Return a table of costs with the machine below it."""
    name, several = model_name(ours.role, ours.suite), [costs for costs in found.values() if costs]
    if not several:
        return PageOutput(note(f"○ not run: no times — {name}."))
    featcal, rows = found[relative_to].get("seconds", math.nan), []
    for label, costs in found.items():
        cells = ["not run", *["–"] * (len(HEAD) - 1)]
        if costs:
            cells = [_cost(costs, measure, several) for measure in MEASURES]
            ratio = costs["seconds"] / featcal
            cells.insert(1, "–" if math.isnan(ratio) else f"{ratio:.1f}×")
        rows.append([label, *cells])
    caption = f"{about} — {name}. Bold: lowest."
    return PageOutput(table(["Method", *HEAD], rows, caption) + note(conditions(ours, kind)))


def _cost(costs: Costs, measure: str, every: list[Costs]) -> str:
    value = costs[measure]
    if math.isnan(value):
        return "not measured"
    text = f"{value:.{MEASURES[measure]}f}"
    return f"<strong>{text}</strong>" if value == min(one[measure] for one in every) else text


def conditions(ours: Evidence, kind: str) -> str:
    """Return machine, threads and neighbours of the measured runs."""
    record = ours.record(kind)
    threads, beside = record.get("threads"), record.get("at_once", 1)
    energy = " Energy: not measured, no GPU." if ours.table(kind)["energy_wh"].isna().all() else ""
    return (
        f"Machine: {ours.machine(kind)}; threads per process: {threads or 'torch’s default'};"
        f" runs at the same time: {beside}.{energy}"
    )


def printed_costs(name: str) -> PageOutput:
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
        rows.append([NAMES[method], *cells])
    caption = f"The paper’s Table {int(name[-2:])}, as printed, memory from GiB: CLIP-ViT-B/32 on an A800 GPU"
    return PageOutput(fold("The paper’s own values", table(["Method", *HEAD], rows, caption)))


def audit(*experiments: Evidence) -> PageOutput:
    """Return the accuracy of the adapters as published after fewer steps than all."""
    steps = sorted({step for ours in experiments for step in ours.table("cost")["step"]})
    rows = []
    for ours, method in product(experiments if steps else (), ORDER[:2]):
        own = select(ours.table("cost"), {"method": method})
        found = [estimate(own[own["step"] == step]) for step in steps]
        label = f"{NAMES[method]} <small>{model_name(ours.role, ours.suite)}</small>"
        rows.append([label, *(f"{v.mean:.1f}" if v else "–" for v in found)])
    caption = "Average top-1 accuracy (%) of the adapters as published after so many steps"
    head = ["Adapter", *(f"{step} steps" for step in steps)]
    return listed(head, rows, caption, "fc-accuracy", "no scores of adapters after fewer steps")
