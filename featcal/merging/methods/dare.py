"""DARE: drop entries of every task vector at random, rescale the rest, then task arithmetic.

Source: Yu et al., Language Models are Super Mario, 2024 (arXiv 2311.03099); FusionBench,
fusion_bench/method/dare.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field, NonNegativeInt
from torch import Tensor

from featcal.core.draws import generator
from featcal.merging.methods.task_arithmetic import task_arithmetic
from featcal.merging.registry import Job, Named, method
from featcal.merging.sources import Derived, Source

Drop = Annotated[float, Field(ge=0, lt=1)]


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
        """Read in float64: rounding to the expert's dtype would add noise to every task vector."""
        base = self.base.finite_tensor(name).double()
        vector = self.inner.finite_tensor(name).double() - base
        return base + dropped(vector, self.share, generator(self.task, f"dare {name}", self.seed))


def sparse(job: Job, drop: float, seed: int) -> Job:
    """Return the job with DARE's experts in place of its own."""
    experts: dict[str, Source] = {
        task: Dropped(expert, job.base, task, drop, seed) for task, expert in job.experts.items()
    }
    return replace(job, experts=experts)


@method("dare", source="Yu et al., 2024, with task arithmetic; defaults of FusionBench", scale=0.3)
def dare(job: Job, drop: Drop = 0.5, seed: NonNegativeInt = 42) -> Iterator[Named]:
    """Yield the task vector of every tensor by task arithmetic on DARE's experts.

    drop: probability with which an entry is dropped.   seed: of what is dropped.
    """
    yield from task_arithmetic(sparse(job, drop, seed))
