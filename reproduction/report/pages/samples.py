"""Table 12 and Figure 3: accuracy by number of samples per task."""

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from reproduction.report.claims import main_setting
from reproduction.report.evidence import Evidence, select
from reproduction.report.figures import COLOURS, CURVES, legend, one_panel, shown
from reproduction.report.html import PageOutput, compact, fold, note, standing, table
from reproduction.report.pages import reproduced
from reproduction.report.paper import model_name, model_title, paper_table
from reproduction.report.statistics import estimate
from reproduction.report.tables import METHODS, SYMBOLS, Cell, average, number

ORDER = ("surgery", "prob_surgery", "featcal")  # of the paper's rows
UPSTREAM = "task_arithmetic"
DASHES = {"featcal": "-", "surgery": "--", "prob_surgery": "-."}
SIZES = {"surgery": "rank", "prob_surgery": "hidden"}  # what an adapter's size is called


def rivals(ours: Evidence, study: str) -> dict[str, Any]:
    """Return the settings of every method in a study; empty where it was not run."""
    told = ours.record(study).get("settings") or ours.settings(study).get("study", {})
    return told.get("rivals", {})


def settings_note(ours: Evidence, study: str, method: str) -> str:
    """Return a method's settings in a study, for the label of its row."""
    values = rivals(ours, study).get(method)
    if not values:
        return ""
    if method == "featcal":
        said = ", ".join(f"{s} {compact(values[k])}" for k, s in SYMBOLS.items() if k in values)
    else:
        said = f"{SIZES[method]} {values[SIZES[method]]}, {values['steps']} steps"
    return f" <small>{said}</small>"


def answer(*experiments: Evidence) -> PageOutput:
    """Return FeatCal with the fewest samples against the merger, the most, and the adapters."""
    rows = []
    for ours in experiments:
        rows_of = {method: _rows(ours, method) for method in ORDER}
        budgets = sorted(rows_of["featcal"]["samples"].unique())
        merged = average(ours, (UPSTREAM, "merged", ""), "samples")
        if not budgets or merged is None:
            rows.append(("", [model_name(ours.role, ours.suite), *["not run"] * 4]))
            continue
        at = {
            (method, n): estimate(own[own["samples"] == n])
            for method, own in rows_of.items()
            for n in budgets
        }
        few, many = budgets[0], budgets[-1]
        pairs = [
            (at["featcal", few], merged),
            (at["featcal", many], at["featcal", few]),
            *((at["featcal", n], max((at[m, n] for m in ORDER[:2] if at[m, n]), key=lambda e: e.mean, default=None)) for n in (few, many)),
        ]  # fmt: skip
        cells = [standing(left, right) if left and right else "–" for left, right in pairs]
        name = f"{model_title(ours.role, ours.suite)} <small>fewest {few}, most {many} samples per task</small>"
        rows.append(("", [name, *cells]))
    head = ["FeatCal", "Fewest − merger", "Most − fewest", "− better adapter, fewest"]
    caption = "Differences of the average accuracy, points. Above, below: by more than two SE."
    return PageOutput(table([*head, "− better adapter, most"], rows, caption, "fc-long"))


def _rows(ours: Evidence, method: str) -> pd.DataFrame:
    key = {"upstream": UPSTREAM, "setting": main_setting(ours.suite), "method": method}
    return select(ours.table("samples"), key)


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


def printed() -> PageOutput:
    """Return the paper's Table 12, one click away."""
    found = paper_table("table12").rename(columns={"samples_per_task": "samples", "std": "sd"})
    caption = "The paper’s Table 12, as printed: CLIP-ViT-B/32"
    return PageOutput(fold("The paper’s own values", _table(found, METHODS, caption)))


def _table(found: pd.DataFrame, labels: dict[str, str], caption: str) -> str:
    groups = found.groupby("samples")["mean"]
    best = {samples: max(round(mean, 1) for mean in own) for samples, own in groups}
    cells = {}
    for one in found.itertuples():
        spread = one.sd if one.sd == one.sd else None
        cell = Cell(one.mean, spread, best=round(one.mean, 1) == best[one.samples])
        cells[one.method, one.samples] = cell
    rows = [("", [labels[m], *(number(cells.get((m, n)), []) for n in best)]) for m in ORDER]
    return table(["Task Arithmetic", *(f"n = {n}" for n in best)], rows, caption, "fc-accuracy")


def _short(ours: Evidence) -> str:
    """Return a note of splits that have fewer samples than a column asks for."""
    runs = ours.table("samples.run")
    fewer = runs[runs["images"] < runs["samples"]] if len(runs) else runs
    found = dict.fromkeys(
        (n, has) for n, has in zip(fewer["samples"], fewer["images"], strict=True)
    )
    told = ", ".join(f"n = {n}: {has}" for n, has in found)
    return note(f"Largest split of some methods, {ours.inputs} per task: {told}.") if told else ""


def compared(ours: Evidence) -> list[reproduced.Compared]:
    """Return our value for every cell of Table 12, whose deviations over three seeds it prints."""
    cells = []
    for _, cell in paper_table("table12").iterrows():
        method, n = cell["method"], cell["samples_per_task"]
        key = {"upstream": UPSTREAM, "method": method, "setting": reproduced.SETTING, "samples": n}
        value = estimate(select(ours.table("samples"), key))
        if value is not None:
            allowed = reproduced.tolerance(value, float(cell["std"]), seeds=3)
            column, mean = f"n = {n}", float(cell["mean"])
            cells.append(reproduced.Compared(METHODS[method], column, value.mean, mean, allowed))
    return cells


def curves(ours: Evidence) -> PageOutput:
    """Return Figure 3: mean over seeds with one standard deviation up and down."""
    return shown(_curves(ours), f"accuracy by number of {ours.inputs}")


def _curves(ours: Evidence) -> Figure | None:
    points = measured(ours)
    if points.empty:
        return None
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
        return figure
