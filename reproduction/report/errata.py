"""What cannot be right in the paper as printed, each with its reason.

Judges nothing: cells stand in errata.yaml, sentences in passages.yaml; here they are checked for
shape and looked up by cell.
"""

from dataclasses import dataclass, field
from functools import cache

import pandas as pd

from reproduction.report.values import packaged, paper_table

KINDS = ("average", "rotated", "reference", "foreign", "unattainable", "contradiction", "change")


@dataclass(frozen=True)
class Erratum:
    """One printed row whose cells cannot all be right.

    row: upstream and method.  cells: tasks or "average".  corrected: what fits, where that can be
    told.
    model: where a table has two.
    """

    id: str
    table: str
    kind: str
    row: list[str]
    cells: list[str]
    reason: str
    corrected: dict[str, float] = field(default_factory=dict)
    model: str = ""


@dataclass(frozen=True)
class Passage:
    """A sentence or formula of the paper that another place of it, or a fact, contradicts."""

    where: str
    says: str
    but: str


@cache
def passages() -> tuple[Passage, ...]:
    """Return every entry of passages.yaml."""
    return tuple(Passage(**entry) for entry in packaged("passages.yaml"))


@cache
def errata() -> tuple[Erratum, ...]:
    """Return every entry of errata.yaml."""
    return tuple(Erratum(**entry) for entry in packaged("errata.yaml"))


def reason(table: str, upstream: str, method: str, cell: str, model: str = "") -> str:
    """Why this printed cell is in doubt; empty where it is not.   model: by its printed name, where
    a table has two.
    """
    rows = [
        e
        for e in errata()
        if (e.table, *e.row) == (table, upstream, method) and e.model in ("", model)
    ]
    found = [e.reason for e in rows if cell in e.cells]
    return " ".join(found)


@cache
def corrected_table(table: str, model: str = "") -> pd.DataFrame:
    """A printed table with what fits in place of what cannot be right, wherever that can be told;
    the rest as printed.
    """
    frame = paper_table(table, model).copy()
    for entry in errata():
        if entry.table == table and entry.corrected:
            upstream, method = entry.row
            row = (frame["upstream"] == upstream) & (frame["method"] == method)
            row &= (frame["model"] == entry.model) if entry.model else True
            for cell, value in entry.corrected.items():
                frame.loc[row & (frame["task"] == cell), "value"] = value
    return frame
