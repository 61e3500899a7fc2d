"""Pictures as tensors, and their random variants in pre-training. Each step's draws are keyed by
(seed, step).
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

MEAN, STD = 0.42, 0.28  # of all pictures, the same for the three channels


def normalised(images: np.ndarray) -> Tensor:
    """(n, 32, 32, 3) uint8 to (n, 3, 32, 32) float32, as the image processor saved with the bases
    does it.
    """
    return (torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - MEAN) / STD


def keyed_generator(*key: int) -> torch.Generator:
    """A generator of its own for each key."""
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


def augmented(x: Tensor, generator: torch.Generator, strong: float = 0.4) -> Tensor:
    """Turned, zoomed and moved a little, colours mixed and offset, noise added. x: (n, 3, h, w),
    normalised.
    """
    count = len(x)

    def uniform() -> Tensor:
        return torch.rand(count, generator=generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    zoom, turn = 1 + strong * (0.35 * uniform() - 0.2), strong * 0.5 * (uniform() - 0.5)
    dx, dy = strong * 0.4 * (uniform() - 0.5), strong * 0.4 * (uniform() - 0.5)
    c, s = turn.cos() / zoom, turn.sin() / zoom
    theta = torch.stack([torch.stack([c, -s, dx], 1), torch.stack([s, c, dy], 1)], 1)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    x = F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)
    mix = torch.eye(3) + strong * 0.25 * normal(count, 3, 3)
    x = torch.einsum("nij,njhw->nihw", mix, x) + strong * 0.3 * normal(count, 3, 1, 1)
    return x + strong * 0.2 * normal(*x.shape)
