"""Consensus merging: of the sum of task vectors only the entries that matter to at least k tasks,
told by TALL masks.

Source: Wang et al., Localizing Task Information for Improved Model Merging, 2024 (arXiv
2405.07813); the authors' code (nik-dim/tall_masks, src/utils/tallmask_utils.py), which chooses λ of
every task on validation data; here all tasks have one.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from featcal.merging.arithmetic import task_vectors
from featcal.merging.job import Job, Named, tensor_by_tensor


def tall_masks(vectors: Sequence[Tensor], threshold: float) -> Tensor:
    """mᵢ = |τᵢ| > λ |Σ τⱼ − τᵢ|: where the expert is further from the base than from the sum.
    Returns: (experts, ...) of bool.
    """
    total = sum(vectors[1:], vectors[0])
    return torch.stack([vector.abs() > threshold * (total - vector).abs() for vector in vectors])


def consensus(job: Job) -> Iterator[Named]:
    """The task vector of every tensor by Consensus TA, τ = m ∘ Σ τᵢ with m = [Σ mᵢ ≥ k]; k = 0 is
    task arithmetic.
    """
    threshold, tasks = job.settings.threshold, job.settings.tasks

    def merged(base: Tensor, experts: Sequence[Tensor]) -> Tensor:
        vectors = task_vectors(base, experts)
        mask = tall_masks(vectors, threshold).sum(0) >= tasks
        return mask * sum(vectors[1:], vectors[0])

    return tensor_by_tensor(job, job.names, merged)
