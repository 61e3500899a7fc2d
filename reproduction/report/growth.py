"""Show what a calibration costs as it grows: time and memory by size, next to the planned memory;
and how long imports take.

The models have ViT-B/32's shape and random weights, so this is of no suite and not about accuracy.
benchmarks/growth.py and benchmarks/imports.py write the files beside this one that are read.
"""

from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from reproduction.report.evidence import read_json
from reproduction.report.figures import WIDTH, drawing
from reproduction.report.html import PageOutput, note, table
from reproduction.report.page import Page, commands, drawn

KEYS = {
    "samples": "samples of each task",
    "tasks": "tasks",
    "layers": "blocks",
    "width": "features",
}
MEASURES = {  # of the file: name, colour, marker, dashes: told apart in grey too
    "seconds": ("time", "#0072B2", "o", "-"),
    "host_bytes": ("memory", "#D55E00", "s", "--"),
}
COMMAND = "python -m benchmarks.{}"
LABEL = "benchmarks, random weights"


def record(name: str = "growth") -> dict[str, Any]:
    """What a benchmark wrote; empty where nothing was run."""
    return read_json(Path(__file__).with_name(f"{name}.json"))


def figure() -> PageOutput:
    """One panel per key, both axes logarithmic: every measure over what it is at the smallest
    size.
    """
    found = record().get("series", {})
    return drawn(curves(found) if found else None, "growth of a calibration", LABEL)


def curves(found: dict[str, Any]) -> Figure:
    """The drawing; slopes in the legends are fitted by least squares."""
    with drawing():
        picture = Figure(figsize=(WIDTH, 3.4 * len(found)), layout="constrained")
        for axes, (key, series) in zip(
            picture.subplots(len(found), 1, squeeze=False)[:, 0], found.items(), strict=True
        ):
            sizes = [point["size"] for point in series["points"]]
            for measure in series["exponents"]:
                name, colour, marker, dashes = MEASURES[measure]
                values = [point["took"][measure] for point in series["points"]]
                look: dict[str, Any] = {
                    "color": colour,
                    "marker": marker,
                    "linestyle": dashes,
                    "lw": 2,
                    "ms": 7,
                }
                power = f"{name}: exponent {series['exponents'][measure]:.2f}"
                axes.loglog(sizes, [value / values[0] for value in values], label=power, **look)
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.minorticks_off()
            axes.set(xlabel=f"{KEYS[key]} (logarithmic)", ylabel="times the smallest")
            axes.legend(loc="upper left")
        return picture


def conditions() -> PageOutput:
    """Machine, day and the point where all series meet."""
    told = record()
    if not told:
        return PageOutput(note(f"○ not run: {COMMAND.format('growth')} has written nothing."))
    base = told["base"]
    days = sorted({series["measured"] for series in told["series"].values()})
    text = (
        f"Measured on {escape(told['machine'])}, {told['processors']} processors, no GPU, {' and '.join(days)}; where a time is "
        "told, nothing else was at work. Random weights of ViT-B/32’s shape; what a panel does not vary is "
        f"{base['tasks']} tasks of {base['samples']} images, {base['layers']} blocks of {base['width']} features, batches of "
        f"{base['batch']}. Each calibration ran once, in a process of its own, from folders to a folder. There was no GPU, "
        "so nothing here says how a calibration grows on one."
    )
    return PageOutput(note(text))


def plans() -> PageOutput:
    """Show the memory of `featcal plan` over the memory that was taken, at every size."""
    rows, off = [], []
    for key, series in record().get("series", {}).items():
        for point in series["points"]:
            took = point["took"]
            ratio = point["planned"]["host_bytes"] / took["host_bytes"]
            off.append(abs(ratio - 1))
            seconds = f"{took['seconds']:.1f}" if "seconds" in took else "–"
            cells = [seconds, f"{took['host_bytes'] / 2**20:.0f}", f"{ratio:.3f}"]
            rows.append(("", [f"{KEYS[key]}: {point['size']}", *cells]))
    if not rows:
        return PageOutput(note("○ not run."))
    head = ["", "Seconds", "MiB above the imports", "Memory, planned / taken"]
    said = f"The planned memory is at most {100 * max(off):.1f} % off."
    return PageOutput(
        table(head, rows, f"Every calibration, and what was planned — {LABEL}", "fc-long")
        + note(said)
    )


def start_up() -> PageOutput:
    """Imports of every stage in a process of its own, beside the median time of the stages on
    record.
    """
    told = record("imports")
    if not told:
        return PageOutput(note(f"○ not run: {COMMAND.format('imports')} has written nothing."))
    rows = []
    for verb, found in told["stages"].items():
        spent, share = found["median"], found["share"]
        cells = ["–", "–"] if spent is None else [f"{spent:.1f}", f"{100 * share:.0f} %"]
        rows.append(
            (
                "",
                [
                    f"<code>{escape(verb)}</code>",
                    f"{found['imports']:.1f}",
                    str(found["stages"]),
                    *cells,
                ],
            )
        )
    head = ["Stage", "Seconds of imports", "On record", "Median seconds", "Share of imports"]
    return PageOutput(
        table(head, rows, f"Imports in a process of its own, beside the stages on record — {LABEL}")
        + note(f"Imports: processor time on {escape(told['machine'])}.")
    )


def provenance(page: Page) -> PageOutput:
    """The commands that make the files again, and the page."""
    rows = [("", [name, f"<code>{COMMAND.format(name)}</code>"]) for name in ("growth", "imports")]
    return PageOutput(
        table(["", ""], rows + commands(page.name), f"Provenance — {LABEL}", "fc-words")
    )
