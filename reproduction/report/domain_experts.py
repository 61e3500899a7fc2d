"""Table 14: the three experts that a Llama is merged from, each on all six tests, and what each won
and lost against its base.
"""

from collections.abc import Iterable

import pandas as pd

from reproduction.report.controls import margin
from reproduction.report.evidence import Evidence, select
from reproduction.report.html import PageOutput, table
from reproduction.report.page import label
from reproduction.report.paper import AVERAGE, PAPER_MODELS, paper_row, player
from reproduction.report.statistics import estimate
from reproduction.report.tables import (
    REFERENCES,
    Cell,
    Row,
    measured_cells,
    with_best,
    with_changes,
)

OWN = {  # domain → the tests of its own
    "coding": ("humaneval_plus", "mbpp_plus"), "math": ("math500", "gsm8k"), "instruction": ("ifeval",),
}  # fmt: skip
BASE = ""  # the base among the experts

Cells = dict[str, Cell]


def models(ours: Evidence) -> dict[str, Cells]:
    """Cells of the base and of every expert by its domain; no cells for what was not run."""
    keys = {BASE: ("", "base", "")} | {domain: ("", "expert", domain) for domain in OWN}
    return {name: measured_cells(ours, key)[0] for name, key in keys.items()}


def highest(found: Iterable[Cells]) -> Cells:
    """The highest value of every test and the mean of those, as the paper's Fine-tuned (STL);
    nothing unless all were run.
    """
    rows = list(found)
    if not all(rows):
        return {}
    top = {
        test: Cell(max(cells[test].value for cells in rows)) for test in rows[0] if test != AVERAGE
    }
    return top | {AVERAGE: Cell(sum(cell.value for cell in top.values()) / len(top))}


def rows(ours: Evidence) -> list[Row]:
    """The block of one model: base, experts with their changes against it, and the highest of every
    column.
    """
    found = models(ours)
    base = Row(REFERENCES["base"], "reference", "", found[BASE])
    experts = [
        with_changes(Row(_name(domain), "calibrated", "", found[domain]), base) for domain in OWN
    ]
    return [
        *with_best([base, *experts]),
        Row(REFERENCES["expert"], "reference", "", highest(found.values())),
    ]


def printed_rows(model: str) -> list[Row]:
    """The paper's block of one model, by its printed name."""
    keys = {REFERENCES["base"]: ("base", "")} | {
        _name(domain): ("expert", domain) for domain in OWN
    }
    found = []
    for name, (method, domain) in (keys | {REFERENCES["expert"]: ("expert", "")}).items():
        cells = {
            str(task): Cell(value)
            for task, value in paper_row("table14", "", method, model, domain).items()
        }
        found.append(Row(name, "calibrated" if domain else "reference", "", cells))
    return found


def _name(domain: str) -> str:
    return f"{domain.capitalize()} expert"


def won_and_lost(suite: str) -> PageOutput:
    """What every expert won on its own tests and lost on all others, here and in the paper."""
    body = []
    for role in ("llama_3b", "llama_8b"):
        ours = Evidence(suite, role, "mergebench")
        for domain in OWN:
            here = [_change(ours.table("scores"), domain, inside) for inside in (True, False)]
            there = [
                _printed_change(PAPER_MODELS[role], domain, inside) for inside in (True, False)
            ]
            body.append(
                ("", [f"{_name(domain)}<small>{player(role, suite)}</small>", *here, *there])
            )
    head = [
        "",
        "Own tests, here",
        "All others, here",
        "Own tests, in the paper",
        "All others, in the paper",
    ]
    caption = f"Mean change against the base (points); within noise: at most two standard errors — {label(suite)}"
    return PageOutput(table(head, body, caption, "fc-long"))


def _change(scores: pd.DataFrame, domain: str, inside: bool) -> str:
    """Of one expert on its own tests or on the others."""
    tests = scores[scores["task"].isin(OWN[domain]) == inside]
    expert, base = (
        estimate(select(tests, key))
        for key in ({"method": "expert", "setting": domain}, {"method": "base"})
    )
    return margin(expert, base)


def _printed_change(model: str, domain: str, inside: bool) -> str:
    rows = (
        paper_row("table14", "", *row).drop(AVERAGE)
        for row in (("expert", model, domain), ("base", model))
    )
    expert, base = (row[row.index.isin(OWN[domain]) == inside].mean() for row in rows)
    return f"{expert - base:+.1f}"
