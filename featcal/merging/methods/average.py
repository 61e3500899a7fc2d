"""Simple averaging."""

from featcal.merging.registry import MergeJob, NamedTensors, method
from featcal.merging.tensors import average_tensor


@method(source="Wortsman et al., 2022")
def average(job: MergeJob) -> NamedTensors:
    """Yield θ = (1/N) Σ θᵢ; the base has no part in it."""
    for name in job.names:
        yield name, average_tensor(*job.read(name))
