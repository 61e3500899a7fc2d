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


def balance(vector: Tensor, total: Tensor, span: Range, experts: int) -> Tensor:
    """βᵢ = exp(N m̂ᵢ²) tanh(τᵢ Σ τⱼ), m̂ᵢ being |τᵢ| clamped and brought to [0, 1]; total: Σ τⱼ; experts: N. In float64."""
    size = (vector.abs().clamp(span.low, span.high) - span.low) / (span.high - span.low or 1.0)
    return torch.exp(experts * size.square()) * torch.tanh(vector * total)


def pcb_tensor(vectors: Sequence[Tensor], ranges: Sequence[Range], cuts: Sequence[Range]) -> Tensor:
    """τ = Σ wᵢ τ̃ᵢ / Σ wᵢ with wᵢ = (max(βᵢ, cut) − cut) / (max βᵢ − cut) and τ̃ᵢ of clamped magnitude; 0 where no entry competes.

    Args: vectors τᵢ (...) in float64; cuts: of each expert where its competing β begin, and the largest.
    """
    merged, weight = torch.zeros_like(vectors[0]), torch.zeros_like(vectors[0])
    total = sum(vectors[1:], vectors[0])
    for vector, span, cut in zip(vectors, ranges, cuts, strict=True):
        beta = balance(vector, total, span, len(vectors))
        own = (beta.clamp_min(cut.low) - cut.low) / (cut.high - cut.low or 1.0)
        merged += own * vector.sign() * vector.abs().clamp(span.low, span.high)
        weight += own
    return merged / weight.clamp_min(1e-12)


class PcbMerge:
    """One merge by PCB: what the whole model says of every expert, and the tensors."""

    def __init__(self, job: Job):
        self.job = job
        self.entries = sum(math.prod(job.base.shape(name)) for name in job.names)
        self.ranges = [self._range(task) for task in job.experts]
        self.cuts = [self._cut(i, task) for i, task in enumerate(job.experts)]

    def _magnitudes(self, task: str) -> Iterator[Tensor]:
        for name in self.job.names:
            one = self.job.base.finite_tensor(name), [self.job.experts[task].finite_tensor(name)]
            for base, expert in pieces(*one):
                yield task_vectors(base.to(self.job.device), [e.to(self.job.device) for e in expert])[0].abs()

    def _balances(self, i: int) -> Iterator[Tensor]:
        """Of one expert, 0 where it works against the sum: such entries never compete."""
        for name in self.job.names:
            for base, experts in pieces(*self.job.read(name)):
                vectors = task_vectors(base, experts)
                yield balance(vectors[i], sum(vectors[1:], vectors[0]), self.ranges[i], len(vectors)).clamp_min(0)

    def _range(self, task: str) -> Range:
        self.job.progress(f"pcb: magnitudes of {task}")
        low, high = int(self.entries * OUTLIERS) + 1, max(1, int(self.entries * (1 - OUTLIERS)))
        found = [kth_smallest(partial(self._magnitudes, task), k) for k in sorted((low, high))]
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
