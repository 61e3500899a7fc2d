"""What studies hold against each other, and what they have in common. Knows nothing of torch,
models or where results go.
"""

from pydantic import PositiveInt

from featcal.baselines.prob_surgery import ProbSurgery
from featcal.baselines.surgery import Surgery
from featcal.settings import Calibration, Settings
from reproduction.experiments.runs import ADAPTER_BATCH, Draw, Setting, Stream


class Rivals(Settings):
    """The three ways to calibrate that a study holds against each other.

    setting: the word of their settings in results.   stream: what the adapters see; FeatCal sees
    training samples.
    batch:   of FeatCal; the result depends on it in the last bits only.
    """

    section = "rivals"
    setting: Setting
    featcal: Calibration
    surgery: Surgery
    prob_surgery: ProbSurgery
    stream: Stream = "test_unlabelled"
    batch: PositiveInt = 128

    def draw(self, method: str, samples: int, seed: int) -> Draw:
        """Which images a method sees, n of each task."""
        if method == "featcal":
            return Draw(stream="train", samples=samples, batch=self.batch, seed=seed)
        return Draw(stream=self.stream, samples=samples, batch=ADAPTER_BATCH, seed=seed)


class Study(Settings):
    """What every study has: the models it is about."""

    role: str
    pool: int
    upstream: str
