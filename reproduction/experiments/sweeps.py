"""The study behind Figure 5 as frozen dataclasses: one of λ, ρ and α varied at a time. Knows nothing of torch or models."""

from dataclasses import dataclass, replace
from typing import Any

from featcal.settings import Calibration, number, require, several, text, whole_number
from reproduction.experiments.runs import SETTINGS

SWEPT = ("ridge", "anchor_blend", "interpolation")


@dataclass(frozen=True)
class Sweep:
    """One of λ, ρ and α varied at a time, the other two as in `featcal`; an empty list leaves one out.

    The value of `featcal`, which the others are compared with, is always among them.
    """

    setting: str
    featcal: Calibration
    ridge: tuple[float, ...] = ()
    anchor_blend: tuple[float, ...] = ()
    interpolation: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require(self.setting in SETTINGS, "around.setting", self.setting, f"must be one of {', '.join(SETTINGS)}")
        for name in SWEPT:
            values = getattr(self, name)
            if values != ():
                several(f"around.{name}", values, number)
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
class SweepStudy:
    """Figure 5: sweeps of λ, ρ and α around one or more settings, on several mergers."""

    role: str
    pool: int
    upstreams: tuple[str, ...]
    samples: int
    batch: int
    seed: int
    around: tuple[Sweep, ...]

    def __post_init__(self) -> None:
        for upstream in self.upstreams:
            text("sweep.upstreams", upstream)
        whole_number("sweep.samples", self.samples)
        whole_number("sweep.batch", self.batch)
        whole_number("sweep.seed", self.seed, least=0)
        words = [sweep.setting for sweep in self.around]
        require(bool(words) and len(set(words)) == len(words), "sweep.around", words, "must name each setting once")
