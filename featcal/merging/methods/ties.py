"""TIES: keep each task vector's largest entries, elect one sign per entry, add the entries that agree.

The cut through a task vector runs over the whole model, so each model is read before the first
tensor is merged. Source: Yadav et al., 2023, with FusionBench's choices as defaults.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from featcal.merging.registry import MergeJob, NamedTensors, method
from featcal.merging.tensors import in_pieces, kth_smallest, magnitudes, tensor_sum, vector_pieces
from featcal.settings import PositiveFraction


def trim(vectors: Sequence[Tensor], cuts: Sequence[float]) -> list[Tensor]:
    """Return each τ with 0 where |τ| is below its cut."""
    return [vector * (vector.abs() >= cut) for vector, cut in zip(vectors, cuts, strict=True)]


def ties_tensor(
    vectors: Sequence[Tensor], cuts: Sequence[float], combine: str, majority: Callable[[], float]
) -> Tensor:
    """Return the merged task vector of one tensor, before its scale, in float64.

    The elected sign of an entry is that of Σ τᵢ after the cut, or `majority()`, that of most
    entries of the model, where the sum is exactly 0. Entries of the other sign are dropped; the
    rest is added, or averaged over the experts that remain.

    Args: vectors (...); cuts: one per expert; combine: "sum" or "mean".
    """
    vectors = trim(vectors, cuts)
    total = tensor_sum(vectors)
    undecided = (total == 0) & torch.stack([vector != 0 for vector in vectors]).any(0)
    positive = total > 0
    if undecided.any():
        positive |= undecided & (majority() > 0)
    agreeing = [torch.where(positive, v.clamp_min(0), v.clamp_max(0)) for v in vectors]
    merged = tensor_sum(agreeing)
    if combine == "mean":
        merged = merged / torch.stack([vector != 0 for vector in agreeing]).sum(0).clamp_min(1)
    return merged


@method(source="Yadav et al., 2023; defaults of FusionBench", scale=0.3)
def ties(
    job: MergeJob, density: PositiveFraction = 0.2, combine: Literal["sum", "mean"] = "sum"
) -> NamedTensors:
    """Yield the task vector of every tensor by TIES; the record keeps each expert's cut.

    density: share of each task vector that is kept, the largest by magnitude: with d entries the
             cut is the (d − ⌊density·d⌋)-th smallest magnitude.
    combine: "sum" (FusionBench, whose recipes the paper follows) or "mean" (the disjoint mean of
             the method's own paper, which takes scale=1).
    """
    entries = sum(math.prod(job.base[name].shape) for name in job.names)
    rank = entries - int(entries * density)
    job.progress("ties: magnitudes")
    cuts = kth_smallest(lambda: magnitudes(job), [(i, rank) for i in range(len(job.experts))])
    job.record["cuts"] = dict(zip(job.experts, cuts, strict=True))

    @cache
    def majority() -> float:
        """Return the sign of the sum of all entries' signs over the whole model."""
        total = 0.0
        for name in job.names:
            for vectors in vector_pieces(job, name):
                total += float(tensor_sum(trim(vectors, cuts)).sign().sum())
        return float((total > 0) - (total < 0))

    yield from in_pieces(job, lambda vectors: ties_tensor(vectors, cuts, combine, majority))
