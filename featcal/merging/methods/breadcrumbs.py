"""Model Breadcrumbs: drop each row's largest entries (outliers) and its small ones.

Source: Davari and Belilovsky, 2024 (arXiv 2312.06795); the authors' code (rezazzr/breadcrumbs,
src/task_vectors.py: TaskVectorMiddleKeep, its first setting to try in find_best_hyperparam.py),
which works on rows where the paper says layers.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from featcal.errors import BadSetting
from featcal.merging.registry import Fraction, Job, Named, method
from featcal.merging.tensors import added, task_vectors, tensor_by_tensor


def masked(vector: Tensor, keep: float, remove: float) -> Tensor:
    """m ∘ τ: in every row (n,) drop the ⌊remove · n⌋ largest magnitudes, then keep the ⌊keep · n⌋
    largest of the rest.

    Args: vector τ (..., n); a scalar stays as it is.
    """
    if vector.dim() == 0:
        return vector
    n = vector.shape[-1]
    order = vector.abs().argsort(dim=-1, descending=True, stable=True)
    first = int(n * remove)
    kept = order[..., first : first + int(n * keep)]
    return vector * torch.zeros_like(vector).scatter_(-1, kept, 1.0)


@method("breadcrumbs", source="Davari and Belilovsky, 2024", scale=0.2)
def breadcrumbs(job: Job, keep: Fraction = 0.15, remove: Fraction = 0.006) -> Iterator[Named]:
    """Yield the task vector of every tensor by Model Breadcrumbs, τ = Σ mᵢ ∘ τᵢ.

    keep, remove: shares of a row's entries, by magnitude. These and the scale are what the
    authors' search tries first.
    """
    if keep + remove > 1:
        expected = f"must be at most 1 - remove = {1 - remove:g}"
        raise BadSetting("merge.breadcrumbs.keep", keep, expected)

    def merged(base: Tensor, experts: Sequence[Tensor]) -> Tensor:
        return added([masked(vector, keep, remove) for vector in task_vectors(base, experts)])

    return tensor_by_tensor(job, job.names, merged)
