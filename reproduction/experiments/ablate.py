"""The study of what FeatCal's gain is made of, as settings. Knows nothing of torch or
models.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from featcal.settings import Calibration, Settings, require
from reproduction.experiments.runs import Each, Setting


class Rescaling(Settings):
    """A merged model is moved along its own change: base + factor · (merged − base), the best
    factor chosen on `split`.
    """

    section = "rescale"
    factors: Each[float]
    split: Literal["validation", "train"]  # never test
    samples: PositiveInt


class AblateStudy(Settings):
    """What the gain is made of, from several mergers: FeatCal without one ingredient each, its
    anchor alone, the merger rescaled.

    without: by name what is changed of `featcal`; afterwards the settings with that change.
    """

    section = "ablate"
    role: str
    pool: int
    setting: Setting
    featcal: Calibration
    upstreams: tuple[str, ...]
    samples: PositiveInt
    batch: PositiveInt
    seed: NonNegativeInt
    without: Mapping[str, Any]
    rescale: Rescaling

    def check(self) -> None:
        whole, changed = dict(self.featcal), {}
        for name, change in self.without.items():
            place = f"ablate.without.{name}"
            require(
                isinstance(change, dict | Calibration) and bool(change),
                place,
                change,
                "must be a mapping of settings",
            )
            changed[str(name)] = Calibration.from_mapping(whole | dict(change), place)
        object.__setattr__(self, "without", changed)
