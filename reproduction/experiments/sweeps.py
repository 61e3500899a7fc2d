"""The study behind Figure 5 as settings: one of λ, ρ and α varied at a time. Knows
nothing of torch or models.
"""

from pydantic import NonNegativeInt, PositiveInt

from featcal.settings import Calibration, Settings, require
from reproduction.experiments.runs import Numbers, Setting

SWEPT = ("ridge", "anchor_blend", "interpolation")


class Sweep(Settings):
    """One of λ, ρ and α varied at a time, the other two as in `featcal`; an empty list leaves one
    out.

    The value of `featcal`, which the others are compared with, is always among them.
    """

    section = "around"
    setting: Setting
    featcal: Calibration
    ridge: Numbers = ()
    anchor_blend: Numbers = ()
    interpolation: Numbers = ()

    def check(self) -> None:
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
        return self.featcal.but(**{name: value})


class SweepStudy(Settings):
    """Figure 5: sweeps of λ, ρ and α around one or more settings, on several mergers."""

    section = "sweep"
    role: str
    pool: int
    upstreams: tuple[str, ...]
    samples: PositiveInt
    batch: PositiveInt
    seed: NonNegativeInt
    around: tuple[Sweep, ...]

    def check(self) -> None:
        words = [sweep.setting for sweep in self.around]
        require(
            bool(words) and len(set(words)) == len(words),
            "sweep.around",
            words,
            "must name each setting once",
        )
