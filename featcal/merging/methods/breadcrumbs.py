"""Model Breadcrumbs: drop each row's largest entries (outliers) and its small ones.

Source: Davari and Belilovsky, 2024 (arXiv 2312.06795); the authors' code (rezazzr/breadcrumbs,
src/task_vectors.py: TaskVectorMiddleKeep, its first setting to try in find_best_hyperparam.py),
which works on rows where the paper says layers; a row has the weights of one output.
"""

import torch
from torch import Tensor

from featcal.merging.registry import MergeJob, NamedTensors, method
from featcal.merging.tensors import conv1d_names, task_vectors, tensor_sum
from featcal.settings import Fraction, require


def mask_row_entries(vector: Tensor, keep: float, remove: float) -> Tensor:
    """Return m ∘ τ: in every row (n,) drop the ⌊remove · n⌋ largest magnitudes, then keep the
    ⌊keep · n⌋ largest of the rest.

    Args: vector τ (..., n); a scalar stays as it is.
    """
    if vector.dim() == 0:
        return vector
    n = vector.shape[-1]
    order = vector.abs().argsort(dim=-1, descending=True, stable=True)
    first = int(n * remove)
    kept = order[..., first : first + int(n * keep)]
    return vector * torch.zeros_like(vector).scatter_(-1, kept, 1.0)


@method(source="Davari and Belilovsky, 2024", scale=0.2)
def breadcrumbs(job: MergeJob, keep: Fraction = 0.15, remove: Fraction = 0.006) -> NamedTensors:
    """Yield the task vector of every tensor by Model Breadcrumbs, τ = Σ mᵢ ∘ τᵢ.

    keep, remove: shares of a row's entries, by magnitude. These and the scale are what the
                  authors' search tries first.
    """
    expected = f"must be at most 1 - remove = {1 - remove:g}"
    require(keep + remove <= 1, "merge.breadcrumbs.keep", keep, expected)
    turned = conv1d_names(job.base)
    for name in job.names:
        vectors = task_vectors(*job.read(name))
        if name in turned:
            vectors = [vector.T for vector in vectors]
        total = tensor_sum([mask_row_entries(vector, keep, remove) for vector in vectors])
        yield name, total.T if name in turned else total
