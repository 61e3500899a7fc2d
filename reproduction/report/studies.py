"""What pages about a study share: with which settings it was run.

A study is an experiment of params.yaml with a stage, a results file and a run record of its own
name.
"""

from typing import Any

from reproduction.report.html import PageOutput, compact, note, table
from reproduction.report.page import SYMBOLS, Page
from reproduction.report.paper import PAPER_SETTINGS

RIVALS = {"featcal": "FeatCal", "surgery": "Surgery", "prob_surgery": "ProbSurgery"}
# Appendix K of the paper; rank and hidden width, which it does not tell, from the published code
PAPERS_RIVALS = {
    "surgery": {"rank": 16, "steps": 1000, "batch": 16, "lr": 1e-3},
    "prob_surgery": {"hidden": 128, "steps": 1000, "batch": 16, "lr": 1e-3},
}
WORDS = {
    "rank": "rank",
    "hidden": "hidden width",
    "steps": "steps",
    "batch": "images per step",
    "lr": "learning rate",
}
STREAMS = {
    "train": "training images",
    "test_unlabelled": "unlabelled test images",
    "unlabelled": "unlabelled texts that are not scored",
}


def samples(page: Page, study: str = "") -> int | None:
    """How many inputs of each task FeatCal got, in a study or the page's own experiment; None where
    that is not one number.
    """
    role, pool = page.place
    if study:
        return page.evidence.settings(study).get("study", {}).get("samples")
    runs = page.evidence.settings().get("calibrate", {}).values()
    several = {run["samples"] for run in runs if run.get("calibration")}
    return several.pop() if len(several) == 1 else None


def settings(page: Page) -> PageOutput:
    """What each method was run with, beside what the paper says of it."""
    study = page.topic.study
    rivals = (
        page.evidence.record(study).get("settings")
        or page.evidence.settings(study).get("study", {})
    ).get("rivals")
    if rivals is None:
        return PageOutput(note(f"○ not run: no settings of this study in the {page.label}."))
    paper = vars(PAPER_SETTINGS[page.place[0]])
    symbols = {name: symbol for name, symbol in SYMBOLS.items() if name in paper}
    rows = [
        (
            "",
            [
                RIVALS["featcal"],
                _listed(rivals["featcal"], symbols),
                STREAMS["train"].replace("images", page.inputs),
                _listed(paper, symbols),
            ],
        )
    ]
    for method, printed in PAPERS_RIVALS.items():
        words = {name: WORDS[name] for name in printed}
        rows.append(
            (
                "",
                [
                    RIVALS[method],
                    _listed(rivals[method], words),
                    STREAMS[rivals["stream"]],
                    _listed(printed, words),
                ],
            )
        )
    head = [
        "Method",
        "Settings here",
        "What it sees",
        "In the paper (rank and hidden width: published code)",
    ]
    number = samples(page, study)
    shown = f"; {number} {page.inputs} per task" if number else ""
    return PageOutput(table(head, rows, f"Settings — {page.label}{shown}", "fc-words"))


def _listed(values: dict[str, Any], words: dict[str, str]) -> str:
    return ", ".join(f"{word} {compact(values[name])}" for name, word in words.items())
