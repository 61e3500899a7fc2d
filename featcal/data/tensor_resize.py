"""Resizing a picture as transformers' processors on torchvision do: as a tensor, antialiased, by
torch's own kernels.

PIL and torchvision have the same filters, but keep their weights and what lies between the two
directions in other precisions, so that some values differ by a grey level or two.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Resampling

from featcal.errors import BadSetting

Pixels = NDArray[np.uint8]


def tensor_resized(array: NDArray[np.uint8], size: tuple[int, int], resample: int) -> Pixels:
    """(h, w, 3) uint8 as (height, width, 3) of the size asked for.

    resample: PIL's number of the filter.
    Raises: BadSetting where torchvision is not installed, or has no such filter.
    """
    functional, modes = _torchvision()
    mode = modes.get(resample)
    if mode is None:
        known = ", ".join(Resampling(number).name.lower() for number in modes)
        raise BadSetting(
            "data.processor",
            "torchvision",
            f"resizes with {known} only; this model's processor asks for {resample}",
        )
    picture = torch.from_numpy(np.array(array)).permute(
        2, 0, 1
    )  # a copy: PIL's own memory is read-only
    resized: Any = functional.resize(picture, list(size), interpolation=mode, antialias=True)
    return np.ascontiguousarray(resized.permute(1, 2, 0).numpy())


def require_torchvision() -> None:
    """Raise BadSetting with the way out unless torchvision can be imported."""
    _torchvision()


def _torchvision() -> tuple[Any, dict[int, Any]]:
    """torchvision's functions on pictures, and its filters by PIL's numbers."""
    try:
        from torchvision.transforms.v2 import InterpolationMode, functional
    except ImportError:
        way_out = "needs torchvision, which is not installed: pip install torchvision; or write processor: pil"
        raise BadSetting("data.processor", "torchvision", way_out) from None
    pairs = {
        Resampling.BILINEAR: InterpolationMode.BILINEAR,
        Resampling.BICUBIC: InterpolationMode.BICUBIC,
    }
    return functional, {int(number): mode for number, mode in pairs.items()}
