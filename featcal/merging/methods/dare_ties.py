"""DARE with TIES."""

from collections.abc import Iterator
from typing import Literal

from pydantic import NonNegativeInt

from featcal.merging.methods.dare import Drop, sparse
from featcal.merging.methods.ties import ties
from featcal.merging.registry import Job, Named, PositiveFraction, method


@method("dare_ties", source="Yu et al., 2024, with TIES; defaults of FusionBench", scale=0.5)
def dare_ties(
    job: Job,
    density: PositiveFraction = 0.2,
    combine: Literal["sum", "mean"] = "sum",
    drop: Drop = 0.5,
    seed: NonNegativeInt = 42,
) -> Iterator[Named]:
    """Yield the task vector of every tensor by TIES on DARE's experts."""
    yield from ties(sparse(job, drop, seed), density, combine)
