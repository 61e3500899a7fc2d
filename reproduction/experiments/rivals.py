"""What studies hold against each other, and what they have in common. Knows nothing of torch,
models or where results go.
"""

from dataclasses import dataclass

from featcal.rivals.settings import ProbSurgery, Surgery
from featcal.settings import Calibration, Checked, Count
from reproduction.experiments.runs import ADAPTER_BATCH, Draw, Setting, Stream


@dataclass(frozen=True)
class Rivals(Checked):
    """The three ways to calibrate that a study holds against each other.

    setting: the word of their settings in results.   stream: what the adapters see; FeatCal sees
    training samples.
    batch:   of FeatCal; the result depends on it in the last bits only.
    """

    place = "rivals"
    setting: Setting
    featcal: Calibration
    surgery: Surgery
    prob_surgery: ProbSurgery
    stream: Stream = "test_unlabelled"
    batch: Count = 128

    def draw(self, method: str, samples: int, seed: int) -> Draw:
        """Which images a method sees, n of each task."""
        if method == "featcal":
            return Draw("train", samples, self.batch, seed)
        return Draw(self.stream, samples, ADAPTER_BATCH, seed)


@dataclass(frozen=True)
class Study(Checked):
    """What every study has: the models it is about."""

    role: str
    pool: int
    upstream: str
