"""Tables 5 and 13 and the page of cost: time, energy and memory of calibrations, time of stages.

Costs come from run records, each measured once, or once per seed, on the machine named with it.
"""

import csv
import math
from html import escape
from itertools import product
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import pandas as pd

from reproduction.report.evidence import Evidence, read_json, results_folder, select
from reproduction.report.figures import figure_output, stacked
from reproduction.report.html import PageOutput, TableRow, folded, mean_cell, note, table, tabulate
from reproduction.report.paper import paper_table, table_name
from reproduction.report.statistics import difference, estimate
from reproduction.report.tables import ADAPTERS, NAMES, method_settings, settings_of

HEAD = ["Time (s)", "Times FeatCal’s", "GPU energy (Wh)", "Peak host memory (MiB)"]
MEASURES = {"seconds": 1, "energy_wh": 2, "memory_mib": 0}  # decimals
ROWS = {  # of Table 5: the paper's three in its order, then rows that the paper lacks
    ("surgery", "each_step"): "Surgery, as published", ("prob_surgery", "each_step"): "ProbSurgery, as published",
    ("featcal", "once"): "FeatCal", ("surgery", "once"): "Surgery, features kept",
    ("prob_surgery", "once"): "ProbSurgery, features kept",
}  # fmt: skip
FEATCAL = ("featcal", "once")
Costs = dict[str, float]
VERBS = {
    "pretrain": "bases", "prepare_data": "images", "prepare_texts": "texts", "prepare": "experts",
    "multitask": "multi-task models", "merge": "merged models", "calibrate": "FeatCal", "adapt": "adapters",
    "ablate": "controls", "evaluate": "scores", "measure": "drift and final features",
}  # fmt: skip
GROWTH = Path(__file__).parents[1] / "growth.json"  # written by benchmarks/growth.py
SPEED = GROWTH.with_name("speed.csv")  # written by benchmarks/speed.py
SIZES = {"samples": "samples per task", "tasks": "tasks", "layers": "blocks", "width": "features"}
MEASURE_LOOKS = {"seconds": ("time", "#0072B2", "o-"), "host_bytes": ("memory", "#D55E00", "s--")}
CHOICES = {("flan_t5_base", "glue"): "smaller T5", ("llama_3b", "mergebench"): "smaller Llama"}
CHOICE_NAMES = {
    "split": "texts from", "decoder": "the decoder reads", "counted": "tokens that count", "tokens": "longest text",
    "modules": "linears solved", "samples": "texts per task",
}  # fmt: skip


def times(*experiments: Evidence) -> PageOutput:
    """Return the time of each way to calibrate as a multiple of FeatCal's, printed and measured."""
    paper = paper_table("table05").set_index("method")["seconds"]
    columns = {"The paper, A800 GPU": {(m, "each_step"): float(paper[m]) for m in ADAPTERS}}
    columns["The paper, A800 GPU"][FEATCAL] = float(paper["featcal"])
    for data in experiments:
        measured = {key: costs["seconds"] for key, costs in _single_costs(data).items() if costs}
        columns[f"{data.model_title}, CPU"] = measured
    rows = [[name] for name in ROWS.values()]
    for seconds, (cells, key) in product(columns.values(), zip(rows, ROWS, strict=True)):
        time = seconds.get(key, math.nan)
        ratio = time / seconds.get(FEATCAL, math.nan)
        cells.append("–" if math.isnan(ratio) else f"{ratio:.1f}× <small>{time:.3g} s</small>")
    caption = "Time of one calibration as a multiple of FeatCal’s; one run each"
    return tabulate(["", *columns], rows, caption)


def single(data: Evidence) -> PageOutput:
    """Return Table 5: every way to calibrate, each run once and alone."""
    labels = {key: name + method_settings(data, "cost", key[0]) for key, name in ROWS.items()}
    costs = {labels[key]: row_costs for key, row_costs in _single_costs(data).items()}
    return _costs(costs, labels[FEATCAL], "One run each, alone on the machine", data, "cost.run")


def _single_costs(data: Evidence) -> dict[tuple[str, str], Costs]:
    runs = select(data.table("cost.run"), {"setting": settings_of(data)[-1]})
    return {(m, e): _means(select(runs, {"method": m, "encode": e})) for m, e in ROWS}


def averages(data: Evidence) -> PageOutput:
    """Return Table 13: means over all numbers of samples and seeds."""
    runs = select(data.table("samples.run"), {"setting": settings_of(data)[-1]})
    labels = {m: ROWS[m, "once"] + method_settings(data, "samples", m) for m in NAMES}
    costs = {labels[m]: _means(select(runs, {"method": m})) for m in NAMES}
    title = f"Means over all numbers of {data.inputs} and seeds"
    return _costs(costs, labels["featcal"], title, data, "samples.run")


def _means(rows: pd.DataFrame) -> Costs:
    """Return the mean of every measure, NaN where not measured in all runs; nothing if not run."""
    return {} if rows.empty else {m: float(rows[m].mean(skipna=False)) for m in MEASURES}


def _costs(
    by_label: dict[str, Costs], relative_to: str, title: str, data: Evidence, kind: str
) -> PageOutput:
    """Return a table of costs with the machine below it."""
    name, known = data.model_name, [c for c in by_label.values() if c]
    if not known:
        return PageOutput(note(f"○ not run: no times — {name}."))
    featcal, rows = by_label[relative_to].get("seconds", math.nan), []
    for label, costs in by_label.items():
        cells = []
        for measure, value in costs.items():
            text = f"{value:.{MEASURES[measure]}f}"
            lowest = value == min(other[measure] for other in known)
            text = f"<strong>{text}</strong>" if lowest else text
            cells.append("not measured" if math.isnan(value) else text)
        ratio = costs.get("seconds", math.nan) / featcal
        cells.insert(1, "–" if math.isnan(ratio) else f"{ratio:.1f}×")
        rows.append([label, *(cells if costs else ["not run", *["–"] * (len(HEAD) - 1)])])
    caption = f"{title} — {name}. Bold: lowest."
    record = data.record(kind)
    threads, jobs = record.get("threads"), record.get("at_once", 1)
    energy = " Energy: not measured, no GPU." if data.table(kind)["energy_wh"].isna().all() else ""
    below = (
        f"Machine: {data.machine(kind)}; threads per process: {threads or 'torch’s default'};"
        f" runs at the same time: {jobs}.{energy}"
    )
    return PageOutput(table(["Method", *HEAD], rows, caption) + note(below))


def printed_costs(name: str) -> PageOutput:
    """Return a printed table of costs, in a fold; memory in MiB."""
    names = {"stage_seconds": "seconds", "peak_cpu_rss_gib": "cpu_rss_gib"}
    frame, rows = paper_table(name).set_index("method").rename(columns=names), []
    for method, label in NAMES.items():
        row, featcal = frame.loc[method], frame.loc["featcal"]
        cells = [f"{row['seconds']:g}", f"{row['seconds'] / featcal['seconds']:.1f}×"]
        cells += [f"{row['gpu_energy_wh']:.1f}", f"{row['cpu_rss_gib'] * 1024:.0f}"]
        rows.append([label, *cells])
    caption = (
        f"The paper’s {table_name(name)}, as printed, memory from GiB: CLIP-ViT-B/32 on an A800 GPU"
    )
    return folded(table(["Method", *HEAD], rows, caption))


def audit(*experiments: Evidence) -> PageOutput:
    """Return the accuracy of the adapters as published after fewer steps than all."""
    steps = sorted({step for data in experiments for step in data.table("cost")["step"]})
    rows = []
    for data, method in product(experiments if steps else (), ADAPTERS):
        keys = ({"method": method, "step": step} for step in steps)
        averages = [estimate(select(data.table("cost"), key)) for key in keys]
        label = f"{NAMES[method]} <small>{data.model_name}</small>"
        rows.append([label, *map(mean_cell, averages)])
    caption = "Average top-1 accuracy (%) of the adapters as published after so many steps"
    head = ["Adapter", *(f"{step} steps" for step in steps)]
    return tabulate(head, rows, caption, "fc-accuracy", "no scores of adapters after fewer steps")


def stage_seconds(suite: str) -> dict[str, float]:
    """Return the recorded seconds of every stage, of its fastest run: others shared the machine."""
    shortest: dict[str, float] = {}
    for record in _records(suite):
        for stage, seconds in record.get("seconds", {}).items():
            shortest[stage] = min(seconds, shortest.get(stage, math.inf))
    return shortest


def machines(suite: str) -> list[str]:
    """Return every machine that the records name."""
    hosts = [record["host"] for record in _records(suite) if record.get("host")]
    names = {f"{h['cpu']}, {h.get('cores', 1)} cores, {h.get('gpu', 'no GPU')}" for h in hosts}
    return sorted(names)


def _records(suite: str) -> list[dict[str, Any]]:
    return [read_json(path) for path in sorted(results_folder(suite).glob("*/*/run.json"))]


def by_kind(suite: str) -> PageOutput:
    """Add up the recorded seconds of all stages by their kind."""
    by_verb: dict[str, list[float]] = {verb: [] for verb in VERBS}
    for stage, seconds in stage_seconds(suite).items():
        by_verb.setdefault(stage.partition("@")[0], []).append(seconds)
    rows: list[TableRow] = []
    for verb, verb_seconds in by_verb.items():
        name = VERBS.get(verb, f"study: {verb.replace('_', ' ')}")
        if verb_seconds:
            rows.append([name, str(len(verb_seconds)), f"{sum(verb_seconds) / 60:.1f}"])
    if rows:
        all_seconds = [seconds for verb_seconds in by_verb.values() for seconds in verb_seconds]
        rows.append(("fc-total", ["all", str(len(all_seconds)), f"{sum(all_seconds) / 60:.0f}"]))
    caption = f"Time of every kind of stage on {'; '.join(map(escape, machines(suite)))}"
    return tabulate(["What is made", "Stages", "Minutes"], rows, caption, "", "no run records")


def speed() -> PageOutput:
    """List the time of the method's published form as a multiple of ours, with the conditions."""
    rows = []
    for row in csv.DictReader(SPEED.read_text().splitlines()):
        spread = f"{row['low']} to {row['high']}" if int(row["pairs"]) > 1 else "one pair"
        how = [row[key] for key in ("instruction set", "threads", "products", "date", "commit")]
        name = row["row"].replace("x", "×")
        rows.append([name, f"{row['ratio']}<small>{spread}</small>", *map(escape, how)])
    head = ["Tasks × images", "Published / ours", "Instructions", "Threads", "Products"]
    caption = "Time of one calibration of ViT-B/32's shape: the published form's over ours"
    return tabulate([*head, "Date", "Commit"], rows, caption, "", "`make bench`")


def growth() -> PageOutput:
    """Draw time and memory of a calibration relative to the smallest size, on logarithmic axes."""
    title, series_by_key = "growth of a calibration", read_json(GROWTH).get("series", {})
    if not series_by_key:
        return figure_output(None, title)
    with stacked(len(series_by_key), 2.6 * len(series_by_key)) as (figure, panels):
        for axes, (key, series) in zip(panels, series_by_key.items(), strict=True):
            sizes = [point["size"] for point in series["points"]]
            for measure, exponent in series["exponents"].items():
                name, colour, line_format = MEASURE_LOOKS[measure]
                values = [point["took"][measure] for point in series["points"]]
                ratios = [value / values[0] for value in values]
                style = {"color": colour, "base": 2, "label": f"{name}: exponent {exponent:.2f}"}
                axes.loglog(sizes, ratios, line_format, **style)
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.yaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
            axes.set(xlabel=SIZES[key], ylabel="times the smallest")
            axes.legend(loc="upper left")
        return figure_output(figure, title)


def plans() -> PageOutput:
    """Compare the memory that `featcal plan` estimated with the memory that was taken."""
    rows = []
    for key, series in read_json(GROWTH).get("series", {}).items():
        for point in series["points"]:
            measured, planned = point["took"], point["planned"]["host_bytes"]
            memory = measured["host_bytes"]
            cells = [f"{measured['seconds']:.1f}" if "seconds" in measured else "–"]
            cells += [f"{memory / 2**20:.0f}", f"{planned / memory:.2f}"]
            rows.append([f"{SIZES[key]}: {point['size']}", *cells])
    head = ["", "Seconds", "MiB above the imports", "Planned / taken"]
    caption = "Every calibration of the figure, and the memory planned for it"
    return tabulate(head, rows, caption, missing="no growth")


def choices(suite: str) -> PageOutput:
    """List how far each choice that the paper leaves open moves the score of a language model."""
    rows = []
    for experiment, name in CHOICES.items():
        data = Evidence(suite, *experiment)
        default = data.settings("choices").get("study", {}).get("reading", {})
        for choice, option, mean, moved_by, noise in choice_effects(data):
            default_option = default.get(choice)
            small = name + f"; default {default_option}" * (default_option is not None)
            label = f"{CHOICE_NAMES[choice]}: {escape(option)}<small>{small}</small>"
            verdict = "moves the score" if abs(moved_by) > noise else "within noise"
            rows.append([label, f"{mean:.1f}", f"{moved_by:+.1f} ± {noise:.1f}", verdict])
    head = ["Changed, one at a time", "Average score (%)", "Change", ""]
    caption = "Choices that the paper leaves open; ± two standard errors"
    return tabulate(head, rows, caption, "fc-words", "no study of open choices")


def choice_effects(data: Evidence) -> list[tuple[str, str, float, float, float]]:
    """Return choice, option, mean, change against the default's draws, and two standard errors.

    These are 2·√(s²(1 + 1/S) + v): s the deviation of the default's S draws, v what other test texts would do
    to the difference, which paired answers show. Empty where the default has fewer than two draws.
    """
    rows = data.table("choices")
    default = select(rows, {"default": 1})
    draws = [float(value) for value in default.groupby("seed")["value"].mean()]
    if len(draws) < 2:
        return []
    by_draw, effects = variance(draws) * (1 + 1 / len(draws)), []
    others = select(rows, {"default": 0}).groupby(["choice", "option"], sort=False)
    for (choice, option), option_rows in others:
        changed, usual = estimate(option_rows), estimate(default)
        texts = difference([(1.0, changed), (-1.0, usual)]).variance
        texts -= changed.seed_variance + usual.seed_variance
        mean, room = float(option_rows["value"].mean()), 2 * math.sqrt(by_draw + texts)
        effects.append((str(choice), str(option), mean, mean - fmean(draws), room))
    return effects
