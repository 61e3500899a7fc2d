"""What pages about a study share: with which settings it was run, and where its numbers come from.

A study is an experiment of params.yaml with a stage, a results file and a run record of its own name.
"""

from html import escape
from typing import Any

from reproduction.report.evidence import Evidence
from reproduction.report.markup import PageOutput, compact, link, note, table
from reproduction.report.show import PLACES, SYMBOLS, commands, evidence, label, run_rows
from reproduction.report.values import PAPER_SETTINGS

RIVALS = {"featcal": "FeatCal", "surgery": "Surgery", "prob_surgery": "ProbSurgery"}
PAPERS_RIVALS = {  # Appendix K of the paper; rank and hidden width, which it does not tell, from the published code
    "surgery": {"rank": 16, "steps": 1000, "batch": 16, "lr": 1e-3},
    "prob_surgery": {"hidden": 128, "steps": 1000, "batch": 16, "lr": 1e-3},
}
WORDS = {"rank": "rank", "hidden": "hidden width", "steps": "steps", "batch": "images per step", "lr": "learning rate"}
STREAMS = {"train": "training images", "test_unlabelled": "unlabelled test images"}
GATHERED = {"samples": "gather_more", "cost": "gather"}  # stages of dvc.yaml: three files or four


def settings(kind: str, page: str, suite: str) -> PageOutput:
    """What each method was run with, beside what the paper says of it."""
    role = PLACES[page][0]
    rivals = evidence(page, suite).record(kind).get("settings", {}).get("rivals")
    if rivals is None:
        return PageOutput(note(f"○ not run: no run record of this study in the {label(suite)}."))
    paper = vars(PAPER_SETTINGS[role])
    symbols = {name: symbol for name, symbol in SYMBOLS.items() if name in paper}
    rows = [("", [RIVALS["featcal"], _listed(rivals["featcal"], symbols), STREAMS["train"], _listed(paper, symbols)])]
    for method, printed in PAPERS_RIVALS.items():
        words = {name: WORDS[name] for name in printed}
        rows.append(("", [RIVALS[method], _listed(rivals[method], words), STREAMS[rivals["stream"]], _listed(printed, words)]))
    head = ["Method", "Settings here", "Images it sees", "In the paper (rank and hidden width: published code)"]
    return PageOutput(table(head, rows, f"Settings — {label(suite)}", "fc-words"))


def _listed(values: dict[str, Any], words: dict[str, str]) -> str:
    return ", ".join(f"{word} {compact(values[name])}" for name, word in words.items())


def provenance(kind: str, page: str, suite: str) -> PageOutput:
    """Files, run record and commands behind a page about one study."""
    role, pool, _ = PLACES[page]
    ours = Evidence(suite, role, pool)
    names = [f"{role}-{pool}.{kind}.{ending}" for ending in ("csv", "run.json")]
    links = [link(f"../results/{suite}/{name}", name) for name in names if (ours.folder / name).is_file()]
    stage = ("", ["Its numbers only", f"<code>dvc repro {GATHERED[kind]}@{escape(f'{kind}-{role}-{pool}')}</code>"])
    rows = [("", ["Results", ", ".join(links) or "none yet"]), *run_rows(ours.record(kind)), *commands(page), stage]
    return PageOutput(table(["", ""], rows, f"Provenance — {label(suite)}", "fc-words"))
