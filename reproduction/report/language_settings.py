"""The settings behind the pages of language models, from the settings files beside their results;
the paper's beside them.
"""

from collections.abc import Iterator
from html import escape
from typing import Any

from reproduction.report.evidence import Evidence
from reproduction.report.html import PageOutput, compact, note, table
from reproduction.report.language import experiments
from reproduction.report.page import SYMBOLS, Page
from reproduction.report.paper import PAPER_SETTINGS, player
from reproduction.report.tables import ADAPTER_LABELS, NAMES

COLUMNS = [
    *list(SYMBOLS.values())[:3],
    "texts per task",
    "split",
    "what is read",
    "longest text",
    "seeds",
]
DECODERS = {
    "answer": "decoder: the answer, teacher-forced",
    "start": "decoder: its start token alone",
}
COUNTED = {
    "all": "every token of prompt and answer counts", "prompt": "tokens of the prompt count",
    "answer": "tokens of the answer count",
}  # fmt: skip
SIZES = {"surgery": "rank", "prob_surgery": "hidden"}  # what an adapter's size is called


def settings(page: Page) -> PageOutput:
    """λ, ρ, α and what FeatCal reads of its texts, and the size and training of the adapters."""
    found = experiments(page)
    rows = [row for ours in found for row in _calibrated(ours)]
    missing = "" if rows else note("○ not run: no settings file yet.")
    for ours in found:
        paper = PAPER_SETTINGS[ours.role].model_dump() | {"samples": 256}
        told = [compact(paper[key]) for key in SYMBOLS]
        name = f"the paper, Section 5.1<small>{player(ours.role, 'paper')}</small>"
        rows.append(("fc-reference", [name, *told, *["not told"] * (len(COLUMNS) - len(told))]))
    html = table(["FeatCal on", *COLUMNS], rows, f"Settings of FeatCal — {page.label}") + missing
    adapters = [row for ours in found for row in _adapted(ours)]
    if adapters:
        head = ["Adapters", "Size", "Width in all", "Steps", "Texts per task", "Features"]
        html += table(
            head, adapters, f"Settings of the adapters, before the language head — {page.label}"
        )
    return PageOutput(html)


def _recorded(ours: Evidence, part: str) -> dict[str, Any]:
    return ours.settings().get(part, {})


def _calibrated(ours: Evidence) -> Iterator[tuple[str, list[str]]]:
    for run in _recorded(ours, "calibrate").values():
        if run.get("calibration"):
            values, reading = run["calibration"] | run, run["reading"]
            reads = (
                DECODERS[reading["decoder"]] if ours.pool == "glue" else COUNTED[reading["counted"]]
            )
            longest = (
                f"{reading['tokens']} tokens" if reading["tokens"] else "the model’s own limit"
            )
            cells = [compact(values[key]) for key in SYMBOLS]
            cells += [escape(reading["split"]), reads, longest, ", ".join(map(str, run["seeds"]))]
            yield "", [player(ours.role, ours.suite), *cells]


def _adapted(ours: Evidence) -> Iterator[tuple[str, list[str]]]:
    for run in _recorded(ours, "adapt").values():
        for setting, chosen in (run.get("settings") or {}).items():
            size, training = SIZES[run["method"]], chosen["training"]
            name = f"{NAMES[run['method']]}<small>{player(ours.role, ours.suite)}</small>"
            cells = [
                ADAPTER_LABELS[setting].removeprefix("adapters "),
                f"{size} {training[size]}",
                compact(training["steps"]),
            ]
            yield (
                "",
                [name, *cells, compact(chosen["draw"]["samples"]), escape(training["features"])],
            )
