"""The method's mathematics on plain tensors, in the paper's letters.

One convention differs: the paper's features are columns (d, n), ours are rows (n, d). So its
G = X Xᵀ/n reads xᵀx/n here, its C = X_tgt X_calᵀ/n appears transposed, and weights keep the paper's
shape (outputs, inputs). Nothing here knows models, files or processes.
"""

from zlib import crc32

import numpy as np
import torch


def generator(task: str, purpose: str, seed: int) -> torch.Generator:
    """Return a CPU generator of (seed, task, purpose), so that no draw depends on another."""
    key = np.random.SeedSequence([seed, crc32(task.encode()), crc32(purpose.encode())])
    return torch.Generator().manual_seed(int(key.generate_state(1, np.uint64)[0]))
