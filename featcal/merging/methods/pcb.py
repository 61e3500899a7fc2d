"""PCB-Merging: entries that are large in their expert and agree with the other experts win.

Shares are taken over the whole model, so the models are read several times before the first tensor
is merged. Source: Du et al., Parameter Competition Balancing for Model Merging, 2024 (arXiv
2410.02396); the authors' code (duguodong7/pcb-merging, pcb-merging.py; ratio and scale of
vision_source_code/pcb.py).
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from featcal.merging.registry import MergeJob, NamedTensors, method
from featcal.merging.tensors import (
    in_pieces,
    kth_smallest,
    magnitudes,
    tensor_sum,
    vector_pieces,
)
from featcal.settings import PositiveFraction

OUTLIERS = 1e-4  # share of an expert's entries at either end whose magnitudes are clamped
Range = tuple[float, float]  # lowest and highest value


def balance(vector: Tensor, total: Tensor, span: Range, experts: int) -> Tensor:
    """Return βᵢ = exp(N m̂ᵢ²) tanh(τᵢ Σ τⱼ) in float64, m̂ᵢ being |τᵢ| clamped and scaled to [0, 1].

    Args: vector τᵢ; total Σ τⱼ; span of |τᵢ|; experts N.
    """
    low, high = span
    size = (vector.abs().clamp(low, high) - low) / (high - low or 1.0)
    return torch.exp(experts * size.square()) * torch.tanh(vector * total)


def pcb_tensor(vectors: Sequence[Tensor], spans: Sequence[Range], cuts: Sequence[Range]) -> Tensor:
    """Return τ = Σ wᵢ τ̃ᵢ / Σ wᵢ, wᵢ = (max(βᵢ, cut) − cut) / (max βᵢ − cut), with τ̃ᵢ of clamped
    magnitude; 0 where no entry competes.

    Args: vectors τᵢ (...) in float64; cuts: each expert's smallest competing β, and its largest.
    """
    merged, weight = torch.zeros_like(vectors[0]), torch.zeros_like(vectors[0])
    total = tensor_sum(vectors)
    for vector, span, (low, high) in zip(vectors, spans, cuts, strict=True):
        beta = balance(vector, total, span, len(vectors))
        own = (beta.clamp_min(low) - low) / (high - low or 1.0)
        merged += own * vector.sign() * vector.abs().clamp(*span)
        weight += own
    return merged / weight.clamp_min(1e-12)


@method(source="Du et al., 2024", scale=1.2)
def pcb(job: MergeJob, ratio: PositiveFraction = 0.05) -> NamedTensors:
    """Yield the task vector of every tensor by PCB-Merging.

    ratio: share of each expert's entries that compete, those of highest β. Ratio and scale are the
           authors' for CLIP.
    """
    count, entries = len(job.experts), sum(math.prod(job.base[name].shape) for name in job.names)
    job.progress("pcb: magnitudes")
    ends = sorted((int(entries * OUTLIERS) + 1, max(1, int(entries * (1 - OUTLIERS)))))
    bounds = kth_smallest(lambda: magnitudes(job), [(i, k) for i in range(count) for k in ends])
    spans = list(zip(bounds[::2], bounds[1::2], strict=True))

    job.progress("pcb: balance")
    rank = min(entries, int(entries * (1 - ratio)) + 1)
    highest = [0.0] * count

    def balances() -> Iterator[list[Tensor]]:
        """Yield β of every expert; 0 where it opposes the sum, as such entries never win."""
        for name in job.names:
            for vectors in vector_pieces(job, name):
                total, betas = tensor_sum(vectors), []
                for i, (vector, span) in enumerate(zip(vectors, spans, strict=True)):
                    betas.append(balance(vector, total, span, count).clamp_min(0))
                    highest[i] = max(highest[i], float(betas[i].max()))
                yield betas

    lowest = kth_smallest(balances, [(i, rank) for i in range(count)])
    cuts = list(zip(lowest, highest, strict=True))
    yield from in_pieces(job, lambda vectors: pcb_tensor(vectors, spans, cuts))
