"""Consensus merging: keep only entries of Σ τᵢ that matter to at least k tasks, by TALL masks.

Source: Wang et al., Localizing Task Information for Improved Model Merging, 2024 (arXiv
2405.07813); the authors' code (nik-dim/tall_masks, src/utils/tallmask_utils.py), which chooses λ of
every task on validation data; here all tasks have one.
"""

from collections.abc import Iterator, Sequence

import torch
from pydantic import NonNegativeInt, PositiveFloat
from torch import Tensor

from featcal.merging.registry import Job, Named, method
from featcal.merging.tensors import added, task_vectors, tensor_by_tensor


def tall_masks(vectors: Sequence[Tensor], threshold: float) -> Tensor:
    """mᵢ = |τᵢ| > λ |Σ τⱼ − τᵢ|, (experts, ...) of bool: the expert is further from the base than
    from the sum.
    """
    total = added(vectors)
    return torch.stack([vector.abs() > threshold * (total - vector).abs() for vector in vectors])


@method("consensus", source="Wang et al., 2024", scale=0.3)
def consensus(
    job: Job, threshold: PositiveFloat = 0.6, tasks: NonNegativeInt = 2
) -> Iterator[Named]:
    """Yield the task vector of every tensor by Consensus TA, τ = m ∘ Σ τᵢ with m = [Σ mᵢ ≥ k].

    threshold: λ of the masks; FusionBench's 0.6 (the authors choose 0.2 to 0.6 per task).
    tasks:     k, to how many tasks an entry must matter; 0 is task arithmetic.
    """

    def merged(base: Tensor, experts: Sequence[Tensor]) -> Tensor:
        vectors = task_vectors(base, experts)
        return (tall_masks(vectors, threshold).sum(0) >= tasks) * added(vectors)

    return tensor_by_tensor(job, job.names, merged)
