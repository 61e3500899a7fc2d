"""Margins of claims that are about more than two models: a gain against another gain, and near one model rather than another.

Knows how many models a claim of a kind names and what to do with their means; knows nothing of files or of verdicts.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from featcal.report.estimate import Estimate
from featcal.report.values import AVERAGE

Side = Any  # [upstream, method], or a mapping with these and more columns, role, pool and task among them


def named(side: Side) -> dict[str, Any]:
    """The columns that one side of a claim fixes."""
    return dict(side) if isinstance(side, dict) else dict(zip(("upstream", "method"), side, strict=True))


@dataclass(frozen=True)
class Margin:
    """A kind of claim: a weighted sum of means that is positive where the claim is met.

    models: the sides to look up, from left, right and than.   weights: of their means, in that order.   words: the means, told.
    """

    models: Callable[[Side, Side, Side], list[Side]]
    weights: tuple[float, ...]
    words: Callable[[Sequence[float]], str]

    def margin(self, means: Sequence[float]) -> float:
        """Σ wₖ·meanₖ."""
        return sum(weight * mean for weight, mean in zip(self.weights, means, strict=True))

    def noise(self, estimates: Sequence[Estimate]) -> float:
        """Two standard errors, 2·√(Σ wₖ²·varianceₖ), all errors taken as independent, which is cautious (see estimate.noise)."""
        return 2 * math.sqrt(sum(w**2 * e.variance for w, e in zip(self.weights, estimates, strict=True)))


def column_of(side: Side) -> str:
    """The column of a table that one side is about: its task where it names one, else the average."""
    return str(named(side).get("task", AVERAGE))


def merger_of(side: Side) -> Side:
    """The merged model that a calibrated one starts from."""
    return named(side) | {"method": "merged"}


MARGINS = {
    # (left − its merger) − (right − its merger)
    "gain": Margin(
        models=lambda left, right, than: [left, merger_of(left), right, merger_of(right)],
        weights=(1, -1, -1, 1),
        words=lambda means: f"{means[0] - means[1]:.1f} against {means[2] - means[3]:.1f} points gained",
    ),
    # (left − than) − (right − left): right is the better model, than the worse one; left is meant to be nearer to right
    "closer": Margin(
        models=lambda left, right, than: [left, right, than],
        weights=(2, -1, -1),
        words=lambda means: (
            f"{means[0] - means[2]:.1f} points above the lower model against {means[1] - means[0]:.1f} below the upper"
        ),
    ),
}
