"""Simple averaging."""

from collections.abc import Iterator

from featcal.merging.registry import MergeJob, NamedTensor, method
from featcal.merging.tensors import average_tensor, tensor_by_tensor


@method("average", source="Wortsman et al., 2022")
def average(job: MergeJob) -> Iterator[NamedTensor]:
    """Yield θ = (1/N) Σ θᵢ; the base has no part in it."""
    return tensor_by_tensor(job, job.names, average_tensor)
