"""Simple averaging and task arithmetic."""

from featcal.merging.registry import MergeJob, NamedTensors, method
from featcal.merging.tensors import average_tensor, task_vectors, tensor_sum


@method(source="Wortsman et al., 2022")
def average(job: MergeJob) -> NamedTensors:
    """Yield θ = (1/N) Σ θᵢ; the base has no part in it."""
    for name in job.names:
        yield name, average_tensor(*job.read(name))


@method(source="Ilharco et al., 2023", scale=0.3)
def task_arithmetic(job: MergeJob) -> NamedTensors:
    """Yield τ = Σ τᵢ; a scale of 0.3 is the paper's for eight tasks."""
    for name in job.names:
        yield name, tensor_sum(task_vectors(*job.read(name)))
