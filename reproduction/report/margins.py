"""What a claim compares, as a weighted sum of models' means that is to exceed a threshold.

Knows the kinds of claims that are such a sum, and which models each names; knows nothing of files, of errors or of verdicts.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

from reproduction.report.values import AVERAGE

Side = Any  # [upstream, method], or a mapping with these and more columns, role, pool, file and task among them
Term = tuple[float, dict[str, Any]]  # a weight, and the columns that name one model's rows
SUMS = ("above", "level", "checked", "gain", "closer", "falls")  # kinds of claims that are a sum of means


def named(side: Side) -> dict[str, Any]:
    """The columns that one side of a claim fixes."""
    return dict(side) if isinstance(side, dict) else dict(zip(("upstream", "method"), side, strict=True))


def terms(kind: str, left: Side, right: Side, than: Side = (), times: float = 1.0, direction: str = "higher") -> list[Term]:
    """The sum Σ wₖ·meanₖ of a claim, positive where it is met (before its threshold).

    above, level, checked: times·left − right.   gain: (left − its merger) − (right − its merger).
    closer: (left − than) − (right − left), right the better model and than the worse one: left is nearer to right.
    falls: (left's curve where it was chosen − left) − (the same of right), two points of a sweep.
    """
    ours, theirs = named(left), named(right)
    if kind == "gain":
        found = [(1.0, ours), (-1.0, merger_of(ours)), (-1.0, theirs), (1.0, merger_of(theirs))]
    elif kind == "closer":
        found = [(2.0, ours), (-1.0, theirs), (-1.0, named(than))]
    elif kind == "falls":
        found = [(1.0, _chosen(ours)), (-1.0, ours), (-1.0, _chosen(theirs)), (1.0, theirs)]
    else:
        found = [(times, ours), (-1.0, theirs)]
    return [(-weight, side) for weight, side in found] if direction == "lower" else found


def told(kind: str, means: Sequence[float], digits: int = 1) -> str:
    """The means behind a claim in words."""
    if kind in ("gain", "falls"):
        verb = "points gained" if kind == "gain" else "points lost"
        return f"{means[0] - means[1]:.1f} against {means[2] - means[3]:.1f} {verb}"
    if kind == "closer":
        return f"{means[0] - means[2]:.1f} points above the lower model against {means[1] - means[0]:.1f} below the upper"
    return f"{means[0]:.{digits}f} against {means[1]:.{digits}f}"


def merger_of(side: Side) -> dict[str, Any]:
    """The merged model that a calibrated one starts from."""
    return {column: value for column, value in named(side).items() if column != "setting"} | {"method": "merged"}


def _chosen(side: dict[str, Any]) -> dict[str, Any]:
    return {column: value for column, value in side.items() if column != "at"} | {"chosen": 1}


def column_of(side: Side) -> str:
    """The column of a table that one side is about: its task where it names one, else the average."""
    return str(named(side).get("task", AVERAGE))


def combinations_of(over: Any) -> list[dict[str, Any]]:
    """What a claim about several experiments or models is about each of: one choice of every list.

    over: a list of [role, pool], or lists by word: place, upstream (of both sides), against (the right side's method).
    """
    lists = over if isinstance(over, dict) else {"place": over}
    return [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]
