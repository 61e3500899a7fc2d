"""Random generators, one per seed, task and purpose."""

from zlib import crc32

import numpy as np
import torch


def generator(task: str, purpose: str, seed: int) -> torch.Generator:
    """Return a CPU generator seeded with (seed, crc32(task), crc32(purpose)).

    So no draw depends on other tasks or on draws for other purposes.
    """
    key = np.random.SeedSequence([seed, crc32(task.encode()), crc32(purpose.encode())])
    return torch.Generator().manual_seed(int(key.generate_state(1, np.uint64)[0]))
