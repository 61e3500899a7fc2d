"""The study of what FeatCal's gain is made of, as frozen dataclasses. Knows nothing of torch or
models.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from featcal.settings import Calibration, Checked, Count, Natural, from_mapping, require
from reproduction.experiments.runs import Once, Setting


@dataclass(frozen=True)
class Rescaling(Checked):
    """A merged model is moved along its own change: base + factor · (merged − base), the best
    factor chosen on `split`.
    """

    place = "rescale"
    factors: Annotated[tuple[float, ...], Once()]
    split: Literal["validation", "train"]  # never test
    samples: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(
            self, "factors", tuple(map(float, self.factors))
        )  # YAML reads 1 as a whole number


@dataclass(frozen=True)
class AblateStudy(Checked):
    """What the gain is made of, from several mergers: FeatCal without one ingredient each, its
    anchor alone, the merger rescaled.

    without: by name what is changed of `featcal`; afterwards the settings with that change.
    """

    place = "ablate"
    role: str
    pool: int
    setting: Setting
    featcal: Calibration
    upstreams: tuple[str, ...]
    samples: Count
    batch: Count
    seed: Natural
    without: Mapping[str, Any]
    rescale: Rescaling

    def __post_init__(self) -> None:
        super().__post_init__()
        whole, changed = asdict(self.featcal), {}
        for name, change in self.without.items():
            place = f"ablate.without.{name}"
            require(
                isinstance(change, dict) and bool(change),
                place,
                change,
                "must be a mapping of settings",
            )
            changed[str(name)] = from_mapping(Calibration, whole | change, place)
        object.__setattr__(self, "without", changed)
