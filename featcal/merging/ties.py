"""TIES: of every task vector the largest entries, of every entry one sign, and only what agrees
with it.

The cut through a task vector runs over the whole model, so each model is read before the first
tensor is merged.
Source: Yadav et al., 2023, with FusionBench's choices as defaults.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from featcal.merging.arithmetic import task_vectors
from featcal.merging.job import Job, Named
from featcal.merging.selection import kth_smallest

PIECE = (
    1 << 20
)  # entries looked at at a time, whatever the size of a tensor: few enough for a cache


def trimmed(base: Tensor, expert: Tensor, cut: float) -> Tensor:
    """τ = θᵢ − θ₀ in float64 with 0 where |τ| lies below the cut."""
    vector = expert.double() - base.double()
    return vector * (vector.abs() >= cut)


def ties_tensor(
    base: Tensor,
    experts: Sequence[Tensor],
    cuts: Sequence[float],
    combine: str,
    majority: Callable[[], float],
) -> Tensor:
    """The merged task vector of one tensor, before its scale, in float64.

    The elected sign of an entry is that of Σ τᵢ after the cut. Where the sum is exactly 0 it is
    `majority()`, the sign that most entries of the model have. Entries of the other sign are left
    out; the rest is added, or averaged over those that remain.

    Args:    base (...), experts (...) each; cuts: of each expert; combine: "sum" or "mean".
    """
    vectors = [trimmed(base, expert, cut) for expert, cut in zip(experts, cuts, strict=True)]
    total = sum(vectors[1:], vectors[0])
    undecided = (total == 0) & torch.stack([vector != 0 for vector in vectors]).any(0)
    positive = total > 0
    if undecided.any():
        positive |= undecided & (majority() > 0)
    agreeing = [
        torch.where(positive, vector.clamp_min(0), vector.clamp_max(0)) for vector in vectors
    ]
    merged = sum(agreeing[1:], agreeing[0])
    if combine == "mean":
        merged = merged / torch.stack([vector != 0 for vector in agreeing]).sum(0).clamp_min(1)
    return merged


def pieces(base: Tensor, experts: Sequence[Tensor]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """The same entries of base and experts, flat, a bounded number at a time."""
    for ours, *theirs in zip(
        *(torch.split(tensor.flatten(), PIECE) for tensor in (base, *experts)), strict=True
    ):
        yield ours, theirs


def in_pieces(job: Job, merged: Callable[[Tensor, list[Tensor]], Tensor]) -> Iterator[Named]:
    """Every tensor in float64 by a function of a bounded number of the same entries of base and
    experts, flat.
    """
    for name in job.names:
        base, experts = job.read(name)
        found = torch.empty(base.numel(), dtype=torch.float64, device=base.device)
        for part, (ours, theirs) in zip(
            torch.split(found, PIECE), pieces(base, experts), strict=True
        ):
            part.copy_(merged(ours, theirs))
        yield name, found.reshape(base.shape)


def magnitudes(job: Job) -> Iterator[list[Tensor]]:
    """|τᵢ| of every expert, a bounded number of the same entries at a time."""
    for name in job.names:
        for base, experts in pieces(*job.read(name)):
            yield [vector.abs() for vector in task_vectors(base, experts)]


class TiesMerge:
    """One merge by TIES: the cuts, the majority sign where an entry needs it, and the task
    vectors.
    """

    def __init__(self, job: Job):
        self.job = job

    @cached_property
    def cuts(self) -> dict[str, float]:
        """By task: the magnitude from which on entries are kept; with d entries the (d −
        ⌊density·d⌋)-th smallest.
        """
        entries = sum(math.prod(self.job.base.shape(name)) for name in self.job.names)
        rank = entries - int(entries * self.job.settings.density)
        self.job.progress("ties: magnitudes")
        found = kth_smallest(
            lambda: magnitudes(self.job), [(i, rank) for i in range(len(self.job.experts))]
        )
        return dict(zip(self.job.experts, found, strict=True))

    @cached_property
    def majority(self) -> float:
        """The sign of the sum of all entries' signs over the whole model; asked for only where two
        experts cancel exactly.
        """
        total = 0.0
        for name in self.job.names:
            for base, experts in pieces(*self.job.read(name)):
                vectors = [
                    trimmed(base, expert, cut)
                    for expert, cut in zip(experts, self.cuts.values(), strict=True)
                ]
                total += float(sum(vectors[1:], vectors[0]).sign().sum())
        return float((total > 0) - (total < 0))

    def vectors(self) -> Iterator[Named]:
        """The merged task vector of every tensor, before its scale, in float64."""
        cuts, combine = list(self.cuts.values()), self.job.settings.combine
        return in_pieces(
            self.job,
            lambda base, experts: ties_tensor(base, experts, cuts, combine, lambda: self.majority),
        )


def ties(job: Job) -> Iterator[Named]:
    """The task vector of every tensor by TIES; the record keeps the cut of each expert."""
    merge = TiesMerge(job)
    job.record["cuts"] = merge.cuts
    yield from merge.vectors()
