"""Task arithmetic."""

from featcal.merging.registry import MergeJob, NamedTensors, method
from featcal.merging.tensors import task_vectors, tensor_sum


@method(source="Ilharco et al., 2023", scale=0.3)
def task_arithmetic(job: MergeJob) -> NamedTensors:
    """Yield τ = Σ τᵢ; a scale of 0.3 is the paper's for eight tasks."""
    for name in job.names:
        yield name, tensor_sum(task_vectors(*job.read(name)))
