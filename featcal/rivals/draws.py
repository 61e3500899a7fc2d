"""What is drawn at random: first weights, the order of samples, noise; each task and each purpose
from a generator of its own.
"""

from collections.abc import Iterator
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from featcal.rivals.settings import Training


def generator(task: str, purpose: str, seed: int) -> torch.Generator:
    """A generator on the CPU, keyed with (seed, crc32(task), crc32(purpose)): no draw depends on
    another task or purpose.
    """
    key = np.random.SeedSequence([seed, crc32(task.encode()), crc32(purpose.encode())])
    return torch.Generator().manual_seed(int(key.generate_state(1, np.uint64)[0]))


def batch_order(task: str, count: int, settings: Training, seed: int) -> Iterator[Tensor]:
    """Which of `count` samples each step sees, without end: indices (n,), n = settings.batch but
    for the last of a shuffle.
    """
    draws = generator(task, "batches", seed)
    while True:
        yield from torch.randperm(count, generator=draws).split(settings.batch)[
            : settings.reshuffle
        ]
