"""Our values against the paper's printed ones, cell by cell, with the difference that is allowed; of the suite `paper` only.

Other suites have other models and data and are held against the paper by claim (verdicts.py), never by value.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from reproduction.report import tables
from reproduction.report.damage import KINDS, UPSTREAM, found
from reproduction.report.errata import corrected_table, reason
from reproduction.report.estimate import Estimate, estimate
from reproduction.report.evidence import Evidence, select
from reproduction.report.values import AVERAGE, PAPER_MODELS, paper_table

SUITE, SETTING = "paper", "paper"
ROUNDING = 0.05  # half a unit of the last printed digit, in points
# Table 12 repeats this experiment of Table 1 under three seeds: how far one run of the paper's own may lie off.
REPEATED, REPEATED_SAMPLES = ("clip_b32", "8", "task_arithmetic"), 256
_MODEL = ("upstream", "method", "setting")  # the columns of a printed row


@dataclass(frozen=True)
class Compared:
    """One printed cell and our value for it, in percent.

    printed: as it stands there.   corrected: what fits in its place, None where the printed one stands.
    allowed: the largest difference that counts as reproduced.   doubt: why the printed cell may be wrong; empty where it may not.
    """

    row: str
    column: str
    ours: float
    printed: float
    allowed: float
    corrected: float | None = None
    doubt: str = ""

    def reproduced(self, value: float) -> bool:
        """Whether ours differs from `value` by no more than is allowed."""
        return abs(self.ours - value) <= self.allowed + 1e-9

    @property
    def as_printed(self) -> bool:
        return self.reproduced(self.printed)

    @property
    def as_corrected(self) -> bool:
        """Reproduced in the corrected form where there is one, else as printed."""
        return self.reproduced(self.printed if self.corrected is None else self.corrected)


def compared(ours: Evidence, number: str) -> list[Compared]:
    """Every cell of a printed table about one role and pool for which there are results, row by row."""
    model = PAPER_MODELS[ours.role]
    printed, mended = paper_table(number, model), corrected_table(number, model)["value"]
    models = {key: measured(ours, *key) for key in dict.fromkeys(zip(*(printed[name] for name in _MODEL), strict=True))}
    cells = []
    for (_, cell), better in zip(printed.iterrows(), mended, strict=True):
        upstream, method, task = (str(cell[name]) for name in ("upstream", "method", "task"))
        value = models[upstream, method, cell["setting"]].get(task)
        if value is not None:
            spread = _printed_spread(ours, upstream, method) if task == AVERAGE else None
            doubt = reason(number, upstream, method, task, model)
            cells.append(cell_of(_name(cell), task, value, float(cell["value"]), float(better), spread, doubt))
    return cells


def cell_of(
    row: str, column: str, ours: Estimate, printed: float, better: float, spread: float | None = None, doubt: str = ""
) -> Compared:
    """One comparison.   better: the corrected value.   spread: standard deviation of the paper's value where it prints one."""
    allowed = tolerance(ours, spread)
    return Compared(row, column, ours.mean, printed, allowed, None if better == printed else better, doubt)


def tolerance(ours: Estimate, spread: float | None = None, seeds: int = 1) -> float:
    """Half a unit of the last printed digit plus two standard errors, in points.

    The variance is ours (test images and, of S seeds, s²/S) and that of the paper's value: its own σ²/seeds where it prints a
    deviation, else one run of ours, s². Where neither is known, a draw adds nothing: the tolerance is then too small rather than
    too large. The part of the test images makes it generous: both see the same ones.
    """
    theirs = spread if spread is not None else ours.spread or 0.0
    return ROUNDING + 2 * (ours.variance + theirs**2 / seeds) ** 0.5


def measured(ours: Evidence, upstream: str, method: str, expert: str = "") -> Mapping[str, Estimate]:
    """Our estimates of one model by task, and on average.   expert: the domain of an expert that has rows of its own."""
    if method == "expert" and not expert and ours.pool == "mergebench":
        return _highest(ours.table("scores"))
    rows = _rows(ours, upstream, method, expert)
    parts = {task: rows[rows["task"] == task] for task in ours.tasks} | {AVERAGE: rows}
    return {task: value for task, part in parts.items() if (value := estimate(part)) is not None}


def average(ours: Evidence, upstream: str, method: str) -> Estimate | None:
    """Our estimate of one model's average."""
    return estimate(_rows(ours, upstream, method))


def _rows(ours: Evidence, upstream: str, method: str, expert: str = "") -> pd.DataFrame:
    key = tables.model_key(upstream, method, SETTING)
    return select(ours.table("scores"), key | {"setting": expert} if method == "expert" else key)


def _highest(scores: pd.DataFrame) -> dict[str, Estimate]:
    """What the paper calls Fine-tuned of its Llamas: of every test the highest of base and experts, and the mean of those."""
    models = scores[scores["method"].isin(("base", "expert"))]
    found = {}
    for task, rows in models.groupby("task", sort=False):
        values = [estimate(own) for _, own in rows.groupby(["method", "setting"])]
        found[str(task)] = max((value for value in values if value), key=lambda value: value.mean)
    if found:
        mean = sum(value.mean for value in found.values()) / len(found)
        found[AVERAGE] = Estimate(mean, sum(value.variance for value in found.values()) / len(found) ** 2, None, 0)
    return found


def budgets(ours: Evidence) -> list[Compared]:
    """Table 12: averages over three seeds by images per task, whose deviations the paper prints."""
    cells = []
    for _, cell in paper_table("table12").iterrows():
        key = {"upstream": "task_arithmetic", "method": cell["method"], "setting": SETTING, "samples": cell["samples_per_task"]}
        value = estimate(select(ours.table("samples"), key))
        if value is not None:
            allowed = tolerance(value, float(cell["std"]), seeds=3)
            row, column = tables.METHODS[cell["method"]], f"n = {cell['samples_per_task']}"
            cells.append(Compared(row, column, value.mean, float(cell["mean"]), allowed))
    return cells


def damaged(ours: Evidence) -> list[Compared]:
    """Table 6: averages by what is done to the calibration images, and the mean of a row."""
    cells = []
    for _, printed in paper_table("table06").iterrows():
        method = "merged" if printed["method"] == UPSTREAM else str(printed["method"])
        for column in (*KINDS, AVERAGE):
            value = found(ours, method, column)
            if value is not None and str(printed[column]):
                name = (tables.METHODS | {"merged": tables.UPSTREAMS[UPSTREAM]})[method]
                head = KINDS.get(column, column)
                cells.append(Compared(name, head, value.mean, float(printed[column]), tolerance(value)))
    return cells


def _printed_spread(ours: Evidence, upstream: str, method: str) -> float | None:
    """Deviation over the paper's own seeds of an average, of the one experiment that it repeats."""
    if (ours.role, ours.pool, upstream) != REPEATED:
        return None
    frame = select(paper_table("table12"), {"method": method})
    own = frame[frame["samples_per_task"] == REPEATED_SAMPLES] if len(frame) else frame
    return float(own["std"].iloc[0]) if len(own) else None


def _name(cell: pd.Series) -> str:
    """How the accuracy tables call a row, with its merger where it has one."""
    upstream, method = cell["upstream"], cell["method"]
    if method in tables.REFERENCES:
        own = str(cell["setting"])
        return f"{own.capitalize()} expert" if own else tables.REFERENCES[method]
    merger = tables.UPSTREAMS[upstream]
    return merger if method == "merged" else f"{merger} {tables.METHODS[method]}"
