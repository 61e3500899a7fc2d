"""The study of settings chosen without labels. Knows nothing of torch,
models or where results go.
"""

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from featcal.settings import Calibration, Settings, require
from reproduction.experiments.runs import TEXT_POOLS, Pool, Reading


class TuneStudy(Settings):
    """A search for λ, ρ and α on one merged model; every candidate is scored on test samples too,
    for the report alone.

    paper:   the paper's settings, where the search begins.
    suite:   settings that labelled validation samples chose, calibrated and scored like a candidate
             but not one; or null.
    samples: of each task, those held out among them.   at_once: candidates that are proposed
    together and run side by side.
    """

    section = "tune"
    role: str
    pool: Pool
    upstream: str
    paper: Calibration
    suite: Calibration | None
    samples: PositiveInt
    batch: PositiveInt
    seed: NonNegativeInt
    trials: PositiveInt
    holdout: Annotated[float, Field(gt=0, lt=1)]
    at_once: PositiveInt
    reading: Reading | None = None

    def check(self) -> None:
        needed = self.pool in TEXT_POOLS
        require(
            (self.reading is not None) == needed,
            "tune.reading",
            self.reading,
            "must be told of texts, and of texts alone",
        )
