"""Consensus merging: keep only entries of Σ τᵢ that matter to at least k tasks, by TALL masks.

Source: Wang et al., Localizing Task Information for Improved Model Merging, 2024 (arXiv
2405.07813); the authors' code (nik-dim/tall_masks, src/utils/tallmask_utils.py), which chooses λ of
every task on validation data; here all tasks share one.
"""

from collections.abc import Sequence

import torch
from pydantic import NonNegativeInt, PositiveFloat
from torch import Tensor

from featcal.merging.registry import MergeJob, NamedTensors, method
from featcal.merging.tensors import task_vectors, tensor_sum


def tall_masks(vectors: Sequence[Tensor], threshold: float) -> Tensor:
    """Return mᵢ = |τᵢ| > λ |Σ τⱼ − τᵢ|, (experts, ...) of bool: where the expert is further from the
    base than from the sum.
    """
    total = tensor_sum(vectors)
    return torch.stack([vector.abs() > threshold * (total - vector).abs() for vector in vectors])


@method(source="Wang et al., 2024", scale=0.3)
def consensus(
    job: MergeJob, threshold: PositiveFloat = 0.6, tasks: NonNegativeInt = 2
) -> NamedTensors:
    """Yield the task vector of every tensor by Consensus TA, τ = m ∘ Σ τᵢ with m = [Σ mᵢ ≥ k].

    threshold: λ of the masks; FusionBench's 0.6 (the authors choose 0.2 to 0.6 per task).
    tasks:     k, the number of tasks to which an entry must matter; 0 is task arithmetic.
    """
    for name in job.names:
        vectors = task_vectors(*job.read(name))
        mask = tall_masks(vectors, threshold).sum(0) >= tasks
        yield name, mask * tensor_sum(vectors)
