"""Model Breadcrumbs: of every row of a task vector neither the largest entries, which are outliers,
nor the small ones.

Source: Davari and Belilovsky, 2024 (arXiv 2312.06795); the authors' code (rezazzr/breadcrumbs,
src/task_vectors.py: TaskVectorMiddleKeep, its first setting to try in find_best_hyperparam.py),
which goes by rows where the paper says layers.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from featcal.merging.arithmetic import task_vectors
from featcal.merging.job import Job, Named, tensor_by_tensor


def masked(vector: Tensor, keep: float, remove: float) -> Tensor:
    """m ∘ τ: in every row (n,) the ⌊remove · n⌋ largest magnitudes go first, then all but the ⌊keep
    · n⌋ largest that are left.

    Args: vector τ (..., n); one number alone stays as it is.
    """
    if vector.dim() == 0:
        return vector
    n = vector.shape[-1]
    order = vector.abs().argsort(dim=-1, descending=True, stable=True)
    first = int(n * remove)
    kept = order[..., first : first + int(n * keep)]
    mask = torch.zeros_like(vector).scatter_(-1, kept, 1.0)
    return vector * mask


def breadcrumbs(job: Job) -> Iterator[Named]:
    """The task vector of every tensor by Model Breadcrumbs, τ = Σ mᵢ ∘ τᵢ."""
    keep, remove = job.settings.keep, job.settings.remove

    def merged(base: Tensor, experts: Sequence[Tensor]) -> Tensor:
        vectors = [masked(vector, keep, remove) for vector in task_vectors(base, experts)]
        return sum(vectors[1:], vectors[0])

    return tensor_by_tensor(job, job.names, merged)
