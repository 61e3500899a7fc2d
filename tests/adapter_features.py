"""Random features of a merged model and of experts that differ from it by a low-rank bend."""

import torch
from tiny import seeded

from featcal.baselines.adapters import Pair

COUNTS = {"mnist": 20, "dtd": 7, "svhn": 33}  # no multiples of the batch of 8


def pair(seed, count, width=12, dtype=torch.float64):
    """Features of `count` images; the expert's differ from the merged model's by a bend."""
    g = seeded(seed)
    merged = torch.randn(count, width, generator=g, dtype=torch.float64)
    down, up = (torch.randn(width, 2, generator=g, dtype=torch.float64) for _ in range(2))
    noise = torch.randn(count, width, generator=g, dtype=torch.float64)
    expert = merged - 0.3 * torch.relu(merged @ down) @ up.T + 0.01 * noise
    return Pair(merged.to(dtype), expert.to(dtype), torch.ones(count, dtype=torch.long))


def pairs(**more):
    """One pair per task, each from its own seed."""
    return {task: pair(i, count, **more) for i, (task, count) in enumerate(COUNTS.items())}


def difference(ours, theirs):
    """Largest difference between the weights of two adapters of the same tasks."""
    assert ours.tasks == theirs.tasks
    return max(
        float((w - theirs.weights[t][n]).abs().max())
        for t, named in ours.weights.items()
        for n, w in named.items()
    )
