"""Fisher merging: average every entry, weighted by how much each expert's answers depend on it.

Source: Matena and Raffel, 2022 (arXiv 2111.09832), with a label drawn from each answer; normalised
as in FusionBench (fusion_bench/method/fisher_merging/fisher_merging.py), which squares one gradient
per batch, where the definition has one per sample. Every expert's diagonal is in memory.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from pydantic import NonNegativeInt, PositiveFloat
from torch import Tensor

from featcal.core.precision import SUM_DTYPE
from featcal.merging.answers import encoder, squared_gradients
from featcal.merging.registry import MergeJob, NamedTensor, method
from featcal.models.batch import check_tasks


def fisher_weights(
    fishers: Sequence[Mapping[str, Tensor]], floor: float, normalize: bool
) -> list[float]:
    """Return cᵢ = 1 / (‖Fᵢ‖ + floor) over the whole model; 1 without `normalize`."""
    if not normalize:
        return [1.0] * len(fishers)
    return [
        1 / (float(torch.stack([F.square().sum() for F in own.values()]).sum().sqrt()) + floor)
        for own in fishers
    ]


def fisher_tensor(
    base: Tensor, experts: Sequence[Tensor], fishers: Sequence[Tensor], weights: Sequence[float]
) -> Tensor:
    """Return θ = Σ cᵢ Fᵢ θᵢ / Σ cᵢ Fᵢ, entry by entry, in the base's shape and dtype."""
    top, bottom = torch.zeros_like(base, dtype=SUM_DTYPE), torch.zeros_like(base, dtype=SUM_DTYPE)
    for expert, F, c in zip(experts, fishers, weights, strict=True):
        top += c * F * expert.double()
        bottom += c * F
    return (top / bottom).to(base.dtype)


@method(
    "fisher",
    source="Matena and Raffel, 2022; normalised as FusionBench does",
    needs=("batches", "head"),
)
def fisher(
    job: MergeJob, normalize: bool = True, floor: PositiveFloat = 1e-6, seed: NonNegativeInt = 42
) -> Iterator[NamedTensor]:
    """Yield every tensor by Fisher merging, Fᵢ = (1/n) Σ (∂ log p(y | x) / ∂θ)².

    normalize: give the diagonals of all experts the same length.
    floor:     added to every entry of them.
    seed:      of the drawn labels.
    """
    check_tasks(job.experts, job.batches)
    model, fishers = encoder(job, "fisher"), []
    for task, expert in job.experts.items():
        sums, count = squared_gradients(job, model, expert, task, seed)
        fishers.append({name: total / count for name, total in sums.items()})
    weights = fisher_weights(fishers, floor, normalize)
    for name in job.names:
        base, experts = job.read(name)
        yield name, fisher_tensor(base, experts, [own[name] + floor for own in fishers], weights)
