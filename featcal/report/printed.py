"""What the paper's own tables say of a claim: as printed, with what cannot be right corrected, and with what stays in doubt.

Reads printed values only; our results are judged in claims.py.
"""

from collections.abc import Callable
from dataclasses import replace

import pandas as pd

from featcal.report.claims import Claim
from featcal.report.errata import corrected_table, errata
from featcal.report.evidence import select
from featcal.report.margins import MARGINS, Side, column_of, named
from featcal.report.values import AVERAGE, PAPER_MODELS, PRINTED, TEXT_PRINTED, paper_table

Read = Callable[[str], pd.DataFrame]


def paper_says(claim: Claim) -> str:
    """The paper's own numbers for a claim; where a correction changes them, both. Typed words where no table has the numbers."""
    if claim.paper or not (claim.table or claim.over or claim.kind in MARGINS):
        return claim.paper
    said, mended = (_said(claim, read) for read in (paper_table, corrected_table))
    return said if said == mended else f"{said} as printed, {mended} corrected"


def paper_margin(claim: Claim, read: Read = paper_table) -> float:
    """By how much the paper's own averages meet a claim; the least of all tasks or columns where it is about each."""
    return min(_margins(claim, read))


def in_doubt(claim: Claim) -> list[str]:
    """Why printed cells that this claim rests on are in doubt, of those for which nothing better can be told."""
    if claim.paper or not paper_says(claim):
        return []
    found: list[str] = []
    for one in _parts(claim):
        for side in _sides(one):
            table, key = _place(one, side), (named(side)["upstream"], named(side)["method"])
            for entry in (e for e in errata() if e.kind != "change"):  # an arrow, not a value
                read = set(entry.cells) - {AVERAGE} if claim.each else {column_of(side)} & set(entry.cells)
                told = f"Table {int(table[-2:])}: {entry.reason}"
                meant = (entry.table, *entry.row) == (table, *key) and entry.model in ("", _model(one, side))
                if meant and read - set(entry.corrected) and told not in found:
                    found.append(told)
    return found


def _said(claim: Claim, read: Read) -> str:
    if claim.over or claim.each:
        margins = _margins(claim, read)
        return f"{sum(m > 0 for m in margins)} of {len(margins)} {claim.parts if claim.over else 'tasks'}"
    averages = [float(_values(claim, side, read)[column_of(side)]) for side in _sides(claim)]
    if claim.kind in MARGINS:
        return MARGINS[claim.kind].words(averages)
    return f"{averages[0]:.1f} against {averages[1]:.1f}"


def _margins(claim: Claim, read: Read) -> list[float]:
    """The margin of every part of a claim, positive where it is met."""
    found: list[float] = []
    for one in _parts(claim):
        values = [_values(one, side, read) for side in _sides(one)]
        cells = [float(value[column_of(side)]) for value, side in zip(values, _sides(one), strict=True)]
        if claim.each:
            found += list((values[0] - values[1]).drop(AVERAGE))
        elif claim.kind in MARGINS:
            found.append(MARGINS[claim.kind].margin(cells))
        else:
            found.append(cells[0] - cells[1])
    return [-margin for margin in found] if claim.direction == "lower" else found


def _parts(claim: Claim) -> list[Claim]:
    return [replace(claim, role=role, pool=str(pool), over=[]) for role, pool in claim.over] or [claim]


def _sides(claim: Claim) -> list[Side]:
    if claim.kind in MARGINS:
        return MARGINS[claim.kind].models(claim.left, claim.right, claim.than)
    return [claim.left, claim.right]


def _place(claim: Claim, side: Side) -> str:
    """The printed table of one side."""
    wanted = named(side)
    place = (wanted.get("role", claim.role), str(wanted.get("pool", claim.pool)))
    return claim.table if claim.table and place == (claim.role, claim.pool) else (PRINTED | TEXT_PRINTED)[place]


def _model(claim: Claim, side: Side) -> str:
    """How the printed tables call the model of one side."""
    return PAPER_MODELS[named(side).get("role", claim.role)]


def _values(claim: Claim, side: Side, read: Read) -> pd.Series:
    """The printed row of one side, by task."""
    frame = read(_place(claim, side))
    if frame["model"].nunique() > 1:
        frame = frame[frame["model"] == _model(claim, side)]
    told = named(side)
    wanted = {"upstream": told["upstream"], "method": told["method"]}
    if wanted["method"] == "expert":
        wanted["setting"] = told.get("setting", "")  # a domain's own expert, or the row of all
    return select(frame, wanted).set_index("task")["value"]
