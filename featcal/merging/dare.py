"""DARE: entries of every task vector are dropped at random and the rest grows in return; then task
arithmetic or TIES.

Source: Yu et al., Language Models are Super Mario, 2024 (arXiv 2311.03099); FusionBench,
fusion_bench/method/dare.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from featcal.merging.arithmetic import task_arithmetic
from featcal.merging.job import Job, Named
from featcal.merging.sources import Derived, Source
from featcal.merging.ties import ties
from featcal.rivals.draws import generator


def dropped(vector: Tensor, share: float, draws: torch.Generator) -> Tensor:
    """m ∘ τ / (1 − p), every entry of m being 0 with probability p: its expectation is τ.

    Args: vector τ (...) in float64; share p in [0, 1); draws: on the CPU, so that every device
    drops the same entries.
    """
    kept = torch.rand(vector.shape, generator=draws) >= share
    return vector * kept.to(vector.device) / (1 - share)


@dataclass
class Dropped(Derived):
    """An expert θ₀ + DARE(θᵢ − θ₀) as a source; a tensor is the same whenever it is read."""

    base: Source
    task: str
    share: float
    seed: int

    def finite_tensor(self, name: str) -> Tensor:
        """In float64: rounding to the expert's dtype would be noise on every task vector."""
        base = self.base.finite_tensor(name).double()
        vector = self.inner.finite_tensor(name).double() - base
        return base + dropped(vector, self.share, generator(self.task, f"dare {name}", self.seed))


def sparse(job: Job) -> Job:
    """The job with DARE's experts in place of its own."""
    chosen = job.settings
    experts: dict[str, Source] = {
        task: Dropped(expert, job.base, task, chosen.drop, chosen.seed)
        for task, expert in job.experts.items()
    }
    return replace(job, experts=experts)


def dare(job: Job) -> Iterator[Named]:
    """The task vector of every tensor by task arithmetic on DARE's experts."""
    yield from task_arithmetic(sparse(job))


def dare_ties(job: Job) -> Iterator[Named]:
    """The task vector of every tensor by TIES on DARE's experts."""
    yield from ties(sparse(job))
