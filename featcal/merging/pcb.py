"""PCB-Merging: parameters compete; an entry that is large in its expert and agrees with the others gets the larger weight.

Shares are taken over the whole model, so each model is read several times before the first tensor is merged.
Source: Du et al., Parameter Competition Balancing for Model Merging, 2024 (arXiv 2410.02396); the authors' code
(duguodong7/pcb-merging, pcb-merging.py; ratio and scale of vision_source_code/pcb.py).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from featcal.merging.arithmetic import task_vectors
from featcal.merging.job import Job, Named
from featcal.merging.selection import kth_smallest
from featcal.merging.ties import pieces

OUTLIERS = 1e-4  # share of an expert's entries at either end whose magnitudes are clamped


@dataclass(frozen=True)
class Range:
    """Of one expert's magnitudes: the smallest and the largest that are left by clamping."""

    low: float
    high: float


def balance(vectors: Sequence[Tensor], ranges: Sequence[Range]) -> Tensor:
    """βᵢ = exp(N m̂ᵢ²) tanh(τᵢ Σ τⱼ), m̂ᵢ being |τᵢ| clamped and brought to [0, 1]. Returns: (experts, ...) in float64."""
    total, found = sum(vectors[1:], vectors[0]), []
    for vector, span in zip(vectors, ranges, strict=True):
        size = (vector.abs().clamp(span.low, span.high) - span.low) / (span.high - span.low or 1.0)
        found.append(torch.exp(len(vectors) * size.square()) * torch.tanh(vector * total))
    return torch.stack(found)


def pcb_tensor(vectors: Sequence[Tensor], ranges: Sequence[Range], cuts: Sequence[Range]) -> Tensor:
    """τ = Σ wᵢ τ̃ᵢ / Σ wᵢ with wᵢ = (max(βᵢ, cut) − cut) / (max βᵢ − cut) and τ̃ᵢ of clamped magnitude; 0 where no entry competes.

    Args: vectors τᵢ (...) in float64; cuts: of each expert where its competing β begin, and the largest.
    """
    merged, weight = torch.zeros_like(vectors[0]), torch.zeros_like(vectors[0])
    for vector, beta, span, cut in zip(vectors, balance(vectors, ranges), ranges, cuts, strict=True):
        own = (beta.clamp_min(cut.low) - cut.low) / (cut.high - cut.low or 1.0)
        merged += own * vector.sign() * vector.abs().clamp(span.low, span.high)
        weight += own
    return merged / weight.clamp_min(1e-12)


class PcbMerge:
    """One merge by PCB: what the whole model says of every expert, and the tensors."""

    def __init__(self, job: Job):
        self.job = job
        self.entries = sum(math.prod(job.base.shape(name)) for name in job.names)
        self.ranges = [self._range(i, task) for i, task in enumerate(job.experts)]
        self.cuts = [self._cut(i, task) for i, task in enumerate(job.experts)]

    def _vectors(self) -> Iterator[list[Tensor]]:
        for name in self.job.names:
            for base, experts in pieces(*self.job.read(name)):
                yield task_vectors(base, experts)

    def _magnitudes(self, i: int) -> Iterator[Tensor]:
        for vectors in self._vectors():
            yield vectors[i].abs()

    def _balances(self, i: int) -> Iterator[Tensor]:
        """Of one expert, 0 where it works against the sum: such entries never compete."""
        for vectors in self._vectors():
            yield balance(vectors, self.ranges)[i].clamp_min(0)

    def _range(self, i: int, task: str) -> Range:
        self.job.progress(f"pcb: magnitudes of {task}")
        low, high = int(self.entries * OUTLIERS) + 1, max(1, int(self.entries * (1 - OUTLIERS)))
        found = [kth_smallest(partial(self._magnitudes, i), k) for k in sorted((low, high))]
        return Range(*found)

    def _cut(self, i: int, task: str) -> Range:
        self.job.progress(f"pcb: balance of {task}")
        rank = min(self.entries, int(self.entries * (1 - self.job.settings.ratio)) + 1)
        highest = max(float(found.max()) for found in self._balances(i))
        return Range(kth_smallest(partial(self._balances, i), rank), highest)

    def tensors(self) -> Iterator[Named]:
        """θ₀ + scale · merged task vector, for every tensor."""
        for name in self.job.names:
            base, experts = self.job.read(name)
            vector = pcb_tensor(task_vectors(base, experts), self.ranges, self.cuts)
            yield name, (base.double() + self.job.settings.scale * vector).to(base.dtype)


def pcb(job: Job) -> Iterator[Named]:
    """Every tensor by PCB-Merging."""
    yield from PcbMerge(job).tensors()
