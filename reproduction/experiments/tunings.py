"""The study of settings chosen without labels, as a frozen dataclass. Knows nothing of torch,
models or where results go.
"""

from dataclasses import dataclass
from typing import Annotated

from featcal.settings import Calibration, Checked, Count, Natural, Within, require
from reproduction.experiments.runs import TEXT_POOLS, Pool, Reading


@dataclass(frozen=True)
class TuneStudy(Checked):
    """A search for λ, ρ and α on one merged model; every candidate is scored on test samples too,
    for the report alone.

    paper:   the paper's settings, where the search begins.
    suite:   settings that labelled validation samples chose, calibrated and scored like a candidate
             but not one; or null.
    samples: of each task, those held out among them.   at_once: candidates that are proposed
    together and run side by side.
    """

    place = "tune"
    role: str
    pool: Pool
    upstream: str
    paper: Calibration
    suite: Calibration | None
    samples: Count
    batch: Count
    seed: Natural
    trials: Count
    holdout: Annotated[float, Within(0, 1, strictly=True)]
    at_once: Count
    reading: Reading | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = self.pool in TEXT_POOLS
        require(
            (self.reading is not None) == needed,
            "tune.reading",
            self.reading,
            "must be told of texts, and of texts alone",
        )
