"""Task arithmetic."""

from collections.abc import Iterator

from featcal.merging.registry import Job, Named, method
from featcal.merging.tensors import tensor_by_tensor, total


@method("task_arithmetic", source="Ilharco et al., 2023", scale=0.3)
def task_arithmetic(job: Job) -> Iterator[Named]:
    """Yield τ = Σ τᵢ; a scale of 0.3 is the paper's for eight tasks."""
    return tensor_by_tensor(job, job.names, total)
