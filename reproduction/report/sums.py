"""The weighted sum of means that a claim is about, from result files: which rows each side names, and the sum with its error.

Knows claims and files; what the sum says of the claim stands in verdicts.py.
"""

from typing import Any

import pandas as pd

from reproduction.report.claims import CALIBRATED, INSIDE, Claim, main_setting
from reproduction.report.estimate import Difference, Estimate, difference, estimate
from reproduction.report.evidence import Evidence, select


def measured_sum(claim: Claim, setting: str, evidence: Evidence) -> Difference | None:
    """The claim's weighted sum of means; None where a model has no rows, or two of an experiment have other tasks."""
    found: list[tuple[float, Estimate]] = []
    tasks: dict[Any, set[str]] = {}
    for weight, side in claim.terms:
        rows = rows_of(claim, side, setting, evidence)
        place = (side.get("role"), side.get("pool"), "task" in rows and "task" not in side)
        one = estimate(rows, claim.measure)
        if one is None or (place[2] and tasks.setdefault(place, set(rows["task"])) != set(rows["task"])):
            return None
        found.append((weight, one))
    return difference(found)


def rows_of(claim: Claim, side: dict[str, Any], setting: str, evidence: Evidence) -> pd.DataFrame:
    """The rows of one side, of the experiment and file it names (default: the claim's).

    FeatCal and adapters are told apart by their settings where the file has them, unless the side or the claim names one.
    """
    own = dict(side)
    place = (own.pop("role", evidence.role), own.pop("pool", evidence.pool))
    kind = own.pop("file", claim.file)
    if place != (evidence.role, evidence.pool):
        evidence = Evidence(evidence.suite, *place, evidence.folder)
    frame = evidence.table(kind)
    wanted = claim.where | own
    if wanted.get("task") == "shown":
        wanted["task"] = evidence.shown
    if wanted.get("block") == "last":
        wanted["block"] = max((b for b in frame["block"].unique() if b not in INSIDE), default="")
    if wanted.get("setting") == "main":
        wanted["setting"] = main_setting(evidence.suite)
    if wanted.get("method") in CALIBRATED and "setting" in frame:
        wanted.setdefault("setting", setting)
    rows = select(frame, {column: value for column, value in wanted.items() if value != "all"})
    if wanted.get("block") == "all":
        rows = rows[~rows["block"].isin(INSIDE)]
    if claim.measure not in rows:
        return rows.iloc[:0]
    measured = rows[claim.measure].notna()  # energy without a GPU: not measured
    return rows if measured.all() else rows[measured]
