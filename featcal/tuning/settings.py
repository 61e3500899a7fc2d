"""What a search for λ, ρ and α tries and finds, as settings; and where it looks.

Knows nothing of torch or models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from featcal.settings import Calibration, Settings

Origin = Literal["start", "path", "search"]

# Ends and steps of the search. λ on a logarithmic scale, from where a Cholesky factor still exists
# in float64 to where the anchor
# is all that is left; ρ by log₂(1 + ρ), from the base (0) to fifteen times the merged change (4),
# where ratios count and not
# differences. All values that the paper uses and sweeps lie inside.
LOG_RIDGE = (-6.0, 1.0, 0.25)
LOG_BLEND = (0.0, 4.0, 0.1)
INTERPOLATION = (0.0, 1.0, 0.05)


class Search(Settings):
    """How λ, ρ and α are searched for.

    trials:  calibrated models that are tried.   holdout: share of every task's samples that no
             calibration sees.
    at_once: trials that are proposed together, knowing all that came before them; 1 unless they are
    run side by side.
    """

    place = "tune"
    trials: PositiveInt = 16
    holdout: Annotated[float, Field(gt=0, lt=1)] = 0.25
    seed: NonNegativeInt = 42
    at_once: PositiveInt = 1


@dataclass(frozen=True)
class Proposal:
    """Settings to be tried. origin: what was started from, the λ of the path, or the sampler's."""

    number: int
    origin: Origin
    settings: Calibration


@dataclass(frozen=True)
class Candidate(Proposal):
    """Settings that were tried. divergence: by task, from the expert on the samples held out;
    smaller is better.
    """

    divergence: Mapping[str, float]

    @property
    def mean(self) -> float:
        """Over tasks, which count alike."""
        return sum(self.divergence.values()) / len(self.divergence)

    @property
    def content(self) -> dict[str, Any]:
        """Return what is written to a file."""
        return vars(self) | {"settings": self.settings.model_dump()}


@dataclass(frozen=True)
class Tuned:
    """What `tune` returns."""

    settings: Calibration
    candidates: Sequence[Candidate]  # in the order of their numbers

    @property
    def best(self) -> Candidate:
        """The candidate whose settings were chosen."""
        return best(self.candidates)


def best(candidates: Sequence[Candidate]) -> Candidate:
    """The one nearest to the experts; of equals the first."""
    return min(candidates, key=lambda one: (one.mean, one.number))


def at(
    settings: Calibration, ridge: float, anchor_blend: float, interpolation: float
) -> Calibration:
    """The settings with λ, ρ and α in their place, in as many digits as one would type."""
    return settings.but(
        ridge=float(f"{ridge:.2g}"),
        anchor_blend=round(anchor_blend, 2),
        interpolation=round(interpolation, 4),
    )
