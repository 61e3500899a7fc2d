"""The domain shift between the pictures a base was pre-trained on and those of a task's own splits.

Every task has one fixed shift, as a camera or scanner would have: a turn, a zoom, a mix of the
colours and a pattern. It makes the zero-shot gap that experts close, and it keeps the tasks' inputs
apart from each other.
"""

from zlib import crc32

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

GREY = 0.42  # mean of the pictures; colours are mixed around it


def shifted(images: np.ndarray, task: str, strength: float) -> np.ndarray:
    """(n, 32, 32, 3) uint8 as the task's own sensor would see them; strength 0 changes nothing.

    x <- (I + 0.3 s N) x + 0.35 s o + 0.7 s P around grey, after a turn by at most s/2 rad and a
    zoom by at most s/4, where N (3, 3), o (3) and P (3, 4, 4, enlarged) are normal and, like turn
    and zoom, fixed by the task's name.
    """
    if strength == 0:
        return images
    rng = np.random.default_rng([crc32(b"shift"), crc32(task.encode())])
    turn, zoom = 0.5 * strength * rng.uniform(-1, 1), 1 + 0.25 * strength * rng.uniform(-1, 1)
    mix = torch.from_numpy(np.eye(3) + 0.3 * strength * rng.standard_normal((3, 3))).float()
    offset = torch.from_numpy(0.35 * strength * rng.standard_normal((3, 1, 1))).float()
    pattern = torch.from_numpy(0.7 * strength * rng.standard_normal((1, 3, 4, 4))).float()
    pattern = F.interpolate(pattern, size=images.shape[1:3], mode="bicubic", align_corners=False)[0]
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - GREY
    x = _turned(x, turn, zoom)
    x = torch.einsum("ij,njhw->nihw", mix, x) + offset + pattern + GREY
    return (x.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).contiguous().numpy()


def _turned(x: Tensor, turn: float, zoom: float) -> Tensor:
    c, s = np.cos(turn) / zoom, np.sin(turn) / zoom
    theta = torch.tensor([[c, -s, 0.0], [s, c, 0.0]], dtype=torch.float32).expand(len(x), 2, 3)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)
