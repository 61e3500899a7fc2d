"""Simple averaging and task arithmetic, tensor by tensor.

Sums run in float64: a mean of equal experts is that expert to the bit, and the order of the tasks does not matter.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from featcal.merging.job import Job, Named, tensor_by_tensor


def task_vectors(base: Tensor, experts: Sequence[Tensor]) -> list[Tensor]:
    """τᵢ = θᵢ − θ₀ in float64, one per expert."""
    return [expert.double() - base.double() for expert in experts]


def average_tensor(base: Tensor, experts: Sequence[Tensor]) -> Tensor:
    """θ = (1/N) Σ θᵢ; the base has no part in it. Returns: the base's shape and dtype. Source: Wortsman et al., 2022."""
    total = experts[0].double()
    for expert in experts[1:]:
        total = total + expert.double()
    return (total / len(experts)).to(base.dtype)


def task_arithmetic_tensor(base: Tensor, experts: Sequence[Tensor], scale: float) -> Tensor:
    """θ = θ₀ + s Σ τᵢ. Returns: the base's shape and dtype. Source: Ilharco et al., 2023; s = 0.3 for eight tasks."""
    total = base.double() * 0
    for vector in task_vectors(base, experts):
        total += vector
    return (base.double() + scale * total).to(base.dtype)


def average(job: Job) -> Iterator[Named]:
    """Every tensor by its mean over the experts."""
    return tensor_by_tensor(job, job.names, average_tensor)


def task_arithmetic(job: Job) -> Iterator[Named]:
    """Every tensor by task arithmetic."""
    return tensor_by_tensor(job, job.names, lambda base, experts: task_arithmetic_tensor(base, experts, job.settings.scale))
