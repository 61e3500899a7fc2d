"""Time of every kind of stage, growth of a calibration, and choices for language models: the page of cost."""

import csv
import math
from collections import Counter
from html import escape
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from matplotlib.figure import Figure

from reproduction.report.evidence import Evidence, read_json, results_folder, select
from reproduction.report.figures import WIDTH, drawing, shown
from reproduction.report.html import PageOutput, Row, listed
from reproduction.report.statistics import difference, estimate

VERBS = {
    "pretrain": "bases", "prepare_data": "images", "prepare_texts": "texts", "prepare": "experts",
    "multitask": "multi-task models", "merge": "merged models", "calibrate": "FeatCal", "adapt": "adapters",
    "ablate": "controls", "evaluate": "scores", "measure": "drift and final features",
}  # fmt: skip
GROWTH = Path(__file__).parents[1] / "growth.json"  # written by benchmarks/growth.py
SPEED = GROWTH.with_name("speed.csv")  # written by benchmarks/speed.py
KEYS = {"samples": "samples per task", "tasks": "tasks", "layers": "blocks", "width": "features"}
LOOKS = {"seconds": ("time", "#0072B2", "o-"), "host_bytes": ("memory", "#D55E00", "s--")}
CHOICES = {("flan_t5_base", "glue"): "smaller T5", ("llama_3b", "mergebench"): "smaller Llama"}
WORDS = {
    "split": "texts from", "decoder": "the decoder reads", "counted": "tokens that count", "tokens": "longest text",
    "modules": "linears solved", "samples": "texts per task",
}  # fmt: skip


def quickest(suite: str) -> dict[str, float]:
    """Return the seconds of every stage on record; of several runs the quickest, as others were next to other work."""
    found: dict[str, float] = {}
    for record in _records(suite):
        for stage, spent in record.get("seconds", {}).items():
            found[stage] = min(spent, found.get(stage, math.inf))
    return found


def machines(suite: str) -> list[str]:
    """Return every machine that the records name."""
    hosts = [record["host"] for record in _records(suite) if record.get("host")]
    return sorted({f"{host['cpu']}, {host.get('cores', 1)} cores" for host in hosts})


def _records(suite: str) -> list[dict[str, Any]]:
    return [read_json(path) for path in sorted(results_folder(suite).glob("*/*/run.json"))]


def by_kind(suite: str) -> PageOutput:
    """Add up the seconds of all stages on record by what they make."""
    spent, counted = Counter[str](), Counter[str]()
    for stage, seconds in quickest(suite).items():
        verb = stage.partition("@")[0]
        spent[verb] += seconds  # type: ignore[assignment]
        counted[verb] += 1
    order = {verb: place for place, verb in enumerate(VERBS)}
    rows: list[Row] = []
    for verb in sorted(spent, key=lambda verb: order.get(verb, len(order))):
        name = VERBS.get(verb, f"study: {verb.replace('_', ' ')}")
        rows.append([name, str(counted[verb]), f"{spent[verb] / 60:.1f}"])
    if rows:
        total = f"{sum(spent.values()) / 60:.0f}"
        rows.append(("fc-total", ["all", str(counted.total()), total]))
    caption = f"Time of every kind of stage on {' and '.join(map(escape, machines(suite)))}, no GPU"
    return listed(["What is made", "Stages", "Minutes"], rows, caption, "", "no run records")


def speed() -> PageOutput:
    """List how many times as long as ours the method's published form takes, with the circumstances."""
    rows = []
    with SPEED.open(newline="") as file:
        for row in csv.DictReader(file):
            spread = f"{row['low']} to {row['high']}" if int(row["pairs"]) > 1 else "one pair"
            how = [row[key] for key in ("instruction set", "threads", "products", "date", "commit")]
            name = row["row"].replace("x", "×")
            rows.append([name, f"{row['ratio']}<small>{spread}</small>", *map(escape, how)])
    head = ["Tasks × images", "Published / ours", "Instructions", "Threads", "Products"]
    caption = "Time of one calibration of ViT-B/32's shape: the published form's over ours"
    return listed([*head, "Date", "Commit"], rows, caption, "", "`make bench`")


def growth() -> PageOutput:
    """Draw time and memory of one calibration over those at the smallest size, both axes logarithmic."""
    what, found = "growth of a calibration", read_json(GROWTH).get("series", {})
    if not found:
        return shown(None, what)
    with drawing():
        figure = Figure(figsize=(WIDTH, 2.6 * len(found)), layout="constrained")
        spots = figure.subplots(len(found), 1, squeeze=False)[:, 0]
        for axes, (key, series) in zip(spots, found.items(), strict=True):
            sizes = [point["size"] for point in series["points"]]
            for measure, exponent in series["exponents"].items():
                name, colour, look = LOOKS[measure]
                values = [point["took"][measure] for point in series["points"]]
                over = [value / values[0] for value in values]
                words = f"{name}: exponent {exponent:.2f}"
                axes.loglog(sizes, over, look, color=colour, label=words)
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.minorticks_off()
            axes.set(xlabel=KEYS[key], ylabel="times the smallest")
            axes.legend(loc="upper left")
        return shown(figure, what)


def plans() -> PageOutput:
    """Compare the memory that `featcal plan` estimated with the memory that was taken."""
    rows = []
    for key, series in read_json(GROWTH).get("series", {}).items():
        for point in series["points"]:
            took = point["took"]
            memory, ratio = took["host_bytes"], point["planned"]["host_bytes"] / took["host_bytes"]
            cells = [f"{took['seconds']:.1f}" if "seconds" in took else "–"]
            cells += [f"{memory / 2**20:.0f}", f"{ratio:.2f}"]
            rows.append([f"{KEYS[key]}: {point['size']}", *cells])
    head = ["", "Seconds", "MiB above the imports", "Planned / taken"]
    caption = "Every calibration of the figure, and the memory planned for it"
    return listed(head, rows, caption, missing="no growth")


def choices(suite: str) -> PageOutput:
    """List how far each choice that the paper leaves open moves the score of a language model."""
    rows = []
    for place, name in CHOICES.items():
        ours = Evidence(suite, *place)
        default = ours.settings("choices").get("study", {}).get("reading", {})
        for choice, option, mean, moved_by, noise in moved(ours):
            small = f"{name}; default {default.get(choice, 'see text')}"
            words = f"{WORDS[choice]}: {escape(option)}<small>{small}</small>"
            verdict = "moves the score" if abs(moved_by) > noise else "within noise"
            rows.append([words, f"{mean:.1f}", f"{moved_by:+.1f} ± {noise:.1f}", verdict])
    head = ["Changed, one at a time", "Average score (%)", "Change", ""]
    caption = "Choices that the paper leaves open; ± two standard errors"
    return listed(head, rows, caption, "fc-words", "no study of open choices")


def moved(ours: Evidence) -> list[tuple[str, str, float, float, float]]:
    """Return choice, option, mean, change against the default's draws, and two standard errors.

    These are 2·√(s²(1 + 1/S) + v): s the deviation of the default's S draws, v what other test texts would do
    to the difference, which paired answers show. Empty where the default has fewer than two draws.
    """
    rows = ours.table("choices")
    default = select(rows, {"default": 1})
    draws = [float(value) for value in default.groupby("seed")["value"].mean()]
    if len(draws) < 2:
        return []
    by_draw, found = variance(draws) * (1 + 1 / len(draws)), []
    own = select(rows, {"default": 0}).groupby(["choice", "option"], sort=False)
    for (choice, option), part in own:
        ends = [(w, one) for w, side in ((1.0, part), (-1.0, default)) if (one := estimate(side))]
        texts = difference(ends).variance - sum(one.seed_variance for _, one in ends)
        mean, room = float(part["value"].mean()), 2 * math.sqrt(by_draw + texts)
        found.append((str(choice), str(option), mean, mean - fmean(draws), room))
    return found
