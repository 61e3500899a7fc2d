"""The study behind Figure 5 as frozen dataclasses: one of λ, ρ and α varied at a time. Knows
nothing of torch or models.
"""

from dataclasses import dataclass, replace
from typing import Any

from featcal.settings import Calibration, Checked, Count, Natural, require
from reproduction.experiments.runs import Numbers, Setting

SWEPT = ("ridge", "anchor_blend", "interpolation")


@dataclass(frozen=True)
class Sweep(Checked):
    """One of λ, ρ and α varied at a time, the other two as in `featcal`; an empty list leaves one
    out.

    The value of `featcal`, which the others are compared with, is always among them.
    """

    place = "around"
    setting: Setting
    featcal: Calibration
    ridge: Numbers = ()
    anchor_blend: Numbers = ()
    interpolation: Numbers = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in SWEPT:
            values = getattr(self, name)
            if values:
                own = getattr(self.featcal, name)
                if own not in values:
                    values = tuple(sorted((*values, own)))
                    object.__setattr__(self, name, values)
                for value in values:
                    self.at(name, value)

    def at(self, name: str, value: float) -> Calibration:
        """The settings with one of them changed. Raises: BadSetting."""
        changed: dict[str, Any] = {name: value}
        return replace(self.featcal, **changed)


@dataclass(frozen=True)
class SweepStudy(Checked):
    """Figure 5: sweeps of λ, ρ and α around one or more settings, on several mergers."""

    place = "sweep"
    role: str
    pool: int
    upstreams: tuple[str, ...]
    samples: Count
    batch: Count
    seed: Natural
    around: tuple[Sweep, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        words = [sweep.setting for sweep in self.around]
        require(
            bool(words) and len(set(words)) == len(words),
            "sweep.around",
            words,
            "must name each setting once",
        )
