"""DARE with TIES."""

from typing import Literal

from pydantic import NonNegativeInt

from featcal.merging.methods.dare import DropRate, with_sparse_experts
from featcal.merging.methods.ties import ties
from featcal.merging.registry import MergeJob, NamedTensors, method
from featcal.settings import PositiveFraction


@method(source="Yu et al., 2024, with TIES; defaults of FusionBench", scale=0.5)
def dare_ties(
    job: MergeJob,
    density: PositiveFraction = 0.2,
    combine: Literal["sum", "mean"] = "sum",
    drop: DropRate = 0.5,
    seed: NonNegativeInt = 42,
) -> NamedTensors:
    """Yield the task vector of every tensor by TIES on DARE's experts."""
    yield from ties(with_sparse_experts(job, drop, seed), density, combine)
