"""DARE: drop entries of every task vector at random, rescale the rest, then task arithmetic.

Source: Yu et al., Language Models are Super Mario, 2024 (arXiv 2311.03099); FusionBench,
fusion_bench/method/dare.
"""

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field, NonNegativeInt
from torch import Tensor

from featcal.core.draws import generator
from featcal.merging.methods.task_arithmetic import task_arithmetic
from featcal.merging.registry import MergeJob, NamedTensors, method
from featcal.merging.sources import Derived, Source

DropRate = Annotated[float, Field(ge=0, lt=1)]


def drop_entries(vector: Tensor, share: float, draws: torch.Generator) -> Tensor:
    """Return m ∘ τ / (1 − p), where each entry of m is 0 with probability p, so its mean is τ.

    Args: vector τ (...) in float64; share p in [0, 1); draws: on the CPU, so that every device
    drops the same entries.
    """
    kept = torch.rand(vector.shape, generator=draws) >= share
    return vector * kept.to(vector.device) / (1 - share)


@dataclass
class SparseExpert(Derived):
    """An expert θ₀ + DARE(θᵢ − θ₀) as a source; a tensor is the same whenever it is read."""

    base: Source
    task: str
    share: float
    seed: int

    def finite_tensor(self, name: str) -> Tensor:
        """Return a tensor in float64, as rounding would add noise to every task vector."""
        base = self.base.finite_tensor(name).double()
        vector = self.inner.finite_tensor(name).double() - base
        draws = generator(self.task, f"dare {name}", self.seed)
        return base + drop_entries(vector, self.share, draws)


def with_sparse_experts(job: MergeJob, drop: float, seed: int) -> MergeJob:
    """Return the job with DARE's experts in place of its own."""
    experts: dict[str, Source] = {
        task: SparseExpert(expert, job.base, task, drop, seed)
        for task, expert in job.experts.items()
    }
    return replace(job, experts=experts)


@method(source="Yu et al., 2024, with task arithmetic; defaults of FusionBench", scale=0.3)
def dare(job: MergeJob, drop: DropRate = 0.5, seed: NonNegativeInt = 42) -> NamedTensors:
    """Yield the task vector of every tensor by task arithmetic on DARE's experts.

    drop: probability with which an entry is dropped.
    seed: of the drawn entries.
    """
    yield from task_arithmetic(with_sparse_experts(job, drop, seed))
