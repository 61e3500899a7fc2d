"""Simple averaging and task arithmetic, tensor by tensor.

Sums run in float64: a mean of equal experts is that expert to the bit, and the order of the tasks
does not matter.
"""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from featcal.merging.job import Job, Named, tensor_by_tensor


def task_vectors(base: Tensor, experts: Sequence[Tensor]) -> list[Tensor]:
    """τᵢ = θᵢ − θ₀ in float64, one per expert."""
    return [expert.double() - base.double() for expert in experts]


def average_tensor(base: Tensor, experts: Sequence[Tensor]) -> Tensor:
    """θ = (1/N) Σ θᵢ; the base has no part in it. Returns: the base's shape and dtype. Source:
    Wortsman et al., 2022.
    """
    total = experts[0].double()
    for expert in experts[1:]:
        total = total + expert.double()
    return (total / len(experts)).to(base.dtype)


def total(base: Tensor, experts: Sequence[Tensor]) -> Tensor:
    """Σ τᵢ in float64."""
    found = base.double() * 0
    for vector in task_vectors(base, experts):
        found += vector
    return found


def moved_tensor(base: Tensor, vector: Tensor, scale: float) -> Tensor:
    """θ₀ + s τ, rounded once. Returns: the base's shape and dtype."""
    return (base.double() + scale * vector).to(base.dtype)


def average(job: Job) -> Iterator[Named]:
    """Every tensor by its mean over the experts."""
    return tensor_by_tensor(job, job.names, average_tensor)


def task_arithmetic(job: Job) -> Iterator[Named]:
    """Task arithmetic's task vector of every tensor, τ = Σ τᵢ. Source: Ilharco et al., 2023; s =
    0.3 for eight tasks.
    """
    return tensor_by_tensor(job, job.names, total)


def moved(job: Job, vectors: Iterable[Named], scale: float) -> Iterator[Named]:
    """Every tensor moved along its task vector: θ₀ + s τ."""
    for name, vector in vectors:
        yield name, moved_tensor(job.base.finite_tensor(name).to(vector.device), vector, scale)
