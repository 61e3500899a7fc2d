"""Simple averaging."""

from collections.abc import Iterator

from featcal.merging.registry import MergeJob, NamedTensor, method
from featcal.merging.tensors import average_tensor


@method("average", source="Wortsman et al., 2022")
def average(job: MergeJob) -> Iterator[NamedTensor]:
    """Yield θ = (1/N) Σ θᵢ; the base has no part in it."""
    for name in job.names:
        yield name, average_tensor(*job.read(name))
