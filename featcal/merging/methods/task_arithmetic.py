"""Task arithmetic."""

from collections.abc import Iterator

from featcal.merging.registry import MergeJob, NamedTensor, method
from featcal.merging.tensors import task_vector_sum, tensor_by_tensor


@method("task_arithmetic", source="Ilharco et al., 2023", scale=0.3)
def task_arithmetic(job: MergeJob) -> Iterator[NamedTensor]:
    """Yield τ = Σ τᵢ; a scale of 0.3 is the paper's for eight tasks."""
    return tensor_by_tensor(job, job.names, task_vector_sum)
