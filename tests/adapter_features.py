"""Random features of a merged model and of experts that differ from it by a bend, for tests of
adapters.
"""

import torch
from tiny import seeded

from featcal.baselines.features import Pair

COUNTS = {
    "mnist": 20,
    "dtd": 7,
    "svhn": 33,
}  # with batches of 8 the last ones of a shuffle are shorter


def pair(seed, count, width=12, dtype=torch.float64):
    """Features of `count` pictures; the expert's lie a low-rank bend away from the merged
    model's.
    """
    g = seeded(seed)
    merged = torch.randn(count, width, generator=g, dtype=torch.float64)
    down, up = (torch.randn(width, 2, generator=g, dtype=torch.float64) for _ in range(2))
    expert = (
        merged
        - 0.3 * torch.relu(merged @ down) @ up.T
        + 0.01 * torch.randn(count, width, generator=g, dtype=torch.float64)
    )
    return Pair(merged.to(dtype), expert.to(dtype), torch.ones(count, dtype=torch.long))


def pairs(counts=COUNTS, **more):
    """One pair per task, each from a seed of its own."""
    return {task: pair(i, count, **more) for i, (task, count) in enumerate(counts.items())}


def difference(ours, theirs):
    """Largest difference between the weights of two adapters of the same tasks."""
    assert ours.tasks == theirs.tasks
    return max(
        float((w - theirs.weights[t][n]).abs().max())
        for t, named in ours.weights.items()
        for n, w in named.items()
    )
