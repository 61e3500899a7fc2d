"""Random generators, one per seed, task and purpose."""

from zlib import crc32

import numpy as np
import torch


def generator(task: str, purpose: str, seed: int) -> torch.Generator:
    """Return a generator on the CPU keyed with (seed, crc32(task), crc32(purpose)).

    No draw depends on another task or purpose.
    """
    key = np.random.SeedSequence([seed, crc32(task.encode()), crc32(purpose.encode())])
    return torch.Generator().manual_seed(int(key.generate_state(1, np.uint64)[0]))
