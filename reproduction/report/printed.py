"""What the paper's own tables say of a claim: as printed, with what cannot be right corrected, and
with what stays in doubt.

Reads printed values only; our results are judged in claims.py.
"""

from collections.abc import Callable

import pandas as pd

from reproduction.report.claims import SUMS, Claim, column_of, told
from reproduction.report.paper import (
    AVERAGE,
    PAPER_MODELS,
    PRINTED,
    TEXT_PRINTED,
    corrected_table,
    errata,
    paper_row,
    paper_table,
)

Read = Callable[..., pd.DataFrame]


def is_printed(claim: Claim) -> bool:
    """Whether printed tables of single models have a claim's numbers, so that none are typed."""
    return claim.kind in SUMS and claim.file == "scores" and not claim.paper


def paper_says(claim: Claim) -> str:
    """The paper's own numbers for a claim; where a correction changes them, both. Typed words where
    no table has the numbers.
    """
    if not is_printed(claim):
        return claim.paper
    said, mended = (_said(claim, read) for read in (paper_table, corrected_table))
    return said if said == mended else f"{said} as printed, {mended} corrected"


def paper_margin(claim: Claim, read: Read = paper_table) -> float:
    """By how much the paper's own averages meet a claim; the least of all tasks or columns where it
    is about each.
    """
    return min(_margin(part, read) for part in _parts(claim))


def in_doubt(claim: Claim) -> list[str]:
    """Why printed cells that this claim rests on are in doubt, of those for which nothing better
    can be told.
    """
    found: list[str] = []
    for one in _parts(claim) if is_printed(claim) else []:
        for _, side in one.terms:
            table, key = _place(one, side), (side["upstream"], side["method"])
            for entry in (e for e in errata() if e.kind != "change"):  # an arrow, not a value
                meant = (entry.table, *entry.row) == (table, *key) and entry.model in (
                    "",
                    _model(one, side),
                )
                reason = f"Table {int(table[-2:])}: {entry.reason}"
                read = {column_of(one.where | side)} & set(entry.cells)
                if meant and read - set(entry.corrected) and reason not in found:
                    found.append(reason)
    return found


def _said(claim: Claim, read: Read) -> str:
    parts = _parts(claim)
    if claim.over or claim.each:
        return f"{sum(_margin(part, read) > 0 for part in parts)} of {len(parts)} {claim.unit}"
    return told(claim.kind, [_value(claim, side, read) for _, side in claim.terms])


def _margin(claim: Claim, read: Read) -> float:
    """The margin of one part of a claim, positive where it is met."""
    return sum(weight * _value(claim, side, read) for weight, side in claim.terms) - claim.by


def _parts(claim: Claim) -> list[Claim]:
    """One claim about each experiment, model or task that a claim is about."""
    found = list(claim.parts.values()) or [claim]
    return [part for one in found for part in _by_task(one)]


def _by_task(claim: Claim) -> list[Claim]:
    if not claim.each:
        return [claim]
    tasks = _row(claim, claim.terms[0][1], paper_table).index.drop(AVERAGE)
    return [claim.of(task) for task in tasks if claim.is_about(task)]


def _place(claim: Claim, side: dict[str, object]) -> str:
    """The printed table of one side."""
    place = (str(side.get("role", claim.role)), str(side.get("pool", claim.pool)))
    return (
        claim.table
        if claim.table and place == (claim.role, claim.pool)
        else (PRINTED | TEXT_PRINTED)[place]
    )


def _model(claim: Claim, side: dict[str, object]) -> str:
    """How the printed tables call the model of one side."""
    return PAPER_MODELS[str(side.get("role", claim.role))]


def _value(claim: Claim, side: dict[str, object], read: Read) -> float:
    return float(_row(claim, side, read)[column_of(claim.where | side)])


def _row(claim: Claim, side: dict[str, object], read: Read) -> pd.Series:
    """The printed row of one side, by task."""
    upstream, method = str(side["upstream"]), str(side["method"])
    setting = (
        str(side.get("setting", "")) if method == "expert" else ""
    )  # a domain's own expert, or the row of all
    return paper_row(_place(claim, side), upstream, method, _model(claim, side), setting, read)
