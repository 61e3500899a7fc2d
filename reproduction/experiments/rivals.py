"""What studies hold against each other, and what they have in common. Knows nothing of torch, models or where results go."""

from dataclasses import dataclass
from typing import Literal

from featcal.rivals.settings import ProbSurgery, Surgery
from featcal.settings import Calibration, require, whole_number
from reproduction.experiments.runs import SETTINGS, Draw

ADAPTER_BATCH = 250  # images encoded at a time, as in `adapt`: another number moves the last bits of a feature


@dataclass(frozen=True)
class Rivals:
    """The three ways to calibrate that a study holds against each other.

    setting: the word of their settings in results.   stream: what the adapters see; FeatCal sees training samples.
    batch:   of FeatCal; the result depends on it in the last bits only.
    """

    setting: str
    featcal: Calibration
    surgery: Surgery
    prob_surgery: ProbSurgery
    stream: Literal["test_unlabelled", "unlabelled", "train"] = "test_unlabelled"
    batch: int = 128

    def __post_init__(self) -> None:
        require(self.setting in SETTINGS, "rivals.setting", self.setting, f"must be one of {', '.join(SETTINGS)}")
        whole_number("rivals.batch", self.batch)
        self.draw("surgery", 1, 0)

    def draw(self, method: str, samples: int, seed: int) -> Draw:
        """Which images a method sees, n of each task."""
        if method == "featcal":
            return Draw("train", samples, self.batch, seed)
        return Draw(self.stream, samples, ADAPTER_BATCH, seed)


@dataclass(frozen=True)
class Study:
    """What every study has: the models it is about."""

    role: str
    pool: int
    upstream: str
