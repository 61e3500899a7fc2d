"""DARE: drop entries of every task vector at random, rescale the rest, then task arithmetic or TIES.

Source: Yu et al., Language Models are Super Mario, 2024 (arXiv 2311.03099); FusionBench,
fusion_bench/method/dare.
"""

from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeInt
from torch import Tensor

from featcal.core import generator
from featcal.merging.methods.task_arithmetic import task_arithmetic
from featcal.merging.methods.ties import ties
from featcal.merging.registry import MergeJob, NamedTensors, method
from featcal.settings import PositiveFraction

DropRate = Annotated[float, Field(ge=0, lt=1)]


def drop_entries(vector: Tensor, share: float, draws: torch.Generator) -> Tensor:
    """Return m ∘ τ / (1 − p), where each entry of m is 0 with probability p, so its mean is τ.

    Args: vector τ (...) in float64; share p in [0, 1); draws: on the CPU, so that every device
    drops the same entries.
    """
    kept = torch.rand(vector.shape, generator=draws) >= share
    return vector * kept.to(vector.device) / (1 - share)


def with_sparse_experts(job: MergeJob, drop: float, seed: int) -> MergeJob:
    """Return the job with experts θ₀ + DARE(θᵢ − θ₀) in place of its own.

    A tensor is the same whenever it is read, and float64, as rounding would add noise to every task
    vector.
    """

    def sparse(task: str, name: str) -> Tensor:
        base = job.base[name].finite().double()
        vector = job.experts[task][name].finite().double() - base
        return base + drop_entries(vector, drop, generator(task, f"dare {name}", seed))

    experts = {
        task: {name: replace(each, read=partial(sparse, task, name)) for name, each in own.items()}
        for task, own in job.experts.items()
    }
    return replace(job, experts=experts)


@method(source="Yu et al., 2024, with task arithmetic; defaults of FusionBench", scale=0.3)
def dare(job: MergeJob, drop: DropRate = 0.5, seed: NonNegativeInt = 42) -> NamedTensors:
    """Yield the task vector of every tensor by task arithmetic on DARE's experts.

    drop: probability with which an entry is dropped.
    seed: of the drawn entries.
    """
    yield from task_arithmetic(with_sparse_experts(job, drop, seed))


@method(source="Yu et al., 2024, with TIES; defaults of FusionBench", scale=0.5)
def dare_ties(
    job: MergeJob,
    density: PositiveFraction = 0.2,
    combine: Literal["sum", "mean"] = "sum",
    drop: DropRate = 0.5,
    seed: NonNegativeInt = 42,
) -> NamedTensors:
    """Yield the task vector of every tensor by TIES on DARE's experts."""
    yield from ties(with_sparse_experts(job, drop, seed), density, combine)
