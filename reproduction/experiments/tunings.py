"""The study of settings chosen without labels, as a frozen dataclass. Knows nothing of torch, models or where results go."""

from dataclasses import dataclass

from featcal.settings import Calibration, require, text, whole_number
from reproduction.experiments.runs import TEXT_POOLS, Pool, Reading


@dataclass(frozen=True)
class TuneStudy:
    """A search for λ, ρ and α on one merged model; every candidate is scored on test samples too, for the report alone.

    paper:   the paper's settings, where the search begins.
    suite:   settings that labelled validation samples chose, calibrated and scored like a candidate but not one; or null.
    samples: of each task, those held out among them.   at_once: candidates that are proposed together and run side by side.
    """

    role: str
    pool: Pool
    upstream: str
    paper: Calibration
    suite: Calibration | None
    samples: int
    batch: int
    seed: int
    trials: int
    holdout: float
    at_once: int
    reading: Reading | None = None

    def __post_init__(self) -> None:
        text("tune.upstream", self.upstream)
        for name in ("samples", "batch", "trials", "at_once"):
            whole_number(f"tune.{name}", getattr(self, name))
        whole_number("tune.seed", self.seed, least=0)
        fine = isinstance(self.holdout, float) and 0 < self.holdout < 1
        require(fine, "tune.holdout", self.holdout, "must lie between 0 and 1, for example 0.25")
        needed = self.pool in TEXT_POOLS
        require((self.reading is not None) == needed, "tune.reading", self.reading, "must be told of texts, and of texts alone")
