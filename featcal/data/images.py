"""From a picture to what a vision model is given, in two steps: decoded once to uint8, normalised when a batch is asked for.

Follows the folder's preprocessor_config.json with PIL's resampling, as the published accuracies were measured; the result equals
transformers' own processors on PIL to the bit. Those on torchvision resize without PIL and may differ by one grey level of 255.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from featcal.data.processors import steps
from featcal.errors import MissingPath
from featcal.storage.results import read_json

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Preprocess:
    """Resize, centre crop, rescale, normalise; None leaves a step out.

    shortest: the short side after resizing.  resized: (height, width) instead, whatever the proportions.  crop: (height, width).
    """

    shortest: int | None
    resized: tuple[int, int] | None
    crop: tuple[int, int] | None
    resample: int
    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Preprocess":
        """What preprocessor_config.json (or processor_config.json) of a model folder says. Raises: MissingPath, BadFile."""
        alone, joint = Path(folder) / "preprocessor_config.json", Path(folder) / "processor_config.json"
        path = alone if alone.is_file() else joint
        if not path.is_file():
            raise MissingPath(alone, "how images are prepared", "copy preprocessor_config.json of the base model there")
        content = read_json(path)
        inner = content.get("image_processor", {}) if path is joint and isinstance(content, dict) else content
        return cls(**steps(path, inner))

    def pixels(self, image: Image.Image) -> Pixels:
        """The picture resized and cropped, (3, H, W)."""
        image = _rgb(image)
        width, height = image.size
        if self.resized is not None:
            image = image.resize(self.resized[::-1], resample=self.resample)
        elif self.shortest is not None:
            long = int(self.shortest * max(width, height) / min(width, height))
            image = image.resize((self.shortest, long) if width <= height else (long, self.shortest), resample=self.resample)
        array = np.asarray(image, dtype=np.uint8)  # (h, w, 3)
        for axis, side in enumerate(self.crop or ()):
            array = _cropped(array, axis, side)
        return np.ascontiguousarray(array.transpose(2, 0, 1))

    def normalised(self, pixels: Pixels) -> Tensor:
        """(n, 3, H, W) uint8 to float32: (x · factor − mean) / std, by a table of the 256 values each channel can have."""
        mean, std = np.asarray(self.mean, np.float32), np.asarray(self.std, np.float32)
        values = (np.arange(256, dtype=np.float64) * self.factor).astype(np.float32)
        out = np.empty(pixels.shape, dtype=np.float32)
        for channel in range(pixels.shape[1]):
            out[:, channel] = ((values - mean[channel]) / std[channel])[pixels[:, channel]]
        return torch.from_numpy(out)


class Rows(Protocol):
    """What holds decoded pictures: an array, a memory map, or something that decodes when indexed."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Pixels: ...


@dataclass(frozen=True)
class Pictures:
    """Pictures without labels: pixels (n, 3, H, W) uint8."""

    pixels: Rows
    preprocess: Preprocess

    def __len__(self) -> int:
        return len(self.pixels)

    def tensor(self, indices: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """What a model is given for these pictures, (len(indices), 3, H, W) float32."""
        return self.preprocess.normalised(self.pixels[np.asarray(indices, dtype=np.int64)])

    def batches(self, indices: Sequence[int] | NDArray[np.int64] | None, size: int) -> Iterator[dict[str, Tensor]]:
        """Keyword dictionaries for a vision model's forward, in the order of `indices` (None: all pictures)."""
        chosen = np.arange(len(self)) if indices is None else np.asarray(indices, dtype=np.int64)
        for start in range(0, len(chosen), size):
            yield {"pixel_values": self.tensor(chosen[start : start + size])}


@dataclass(frozen=True)
class ImageSet(Pictures):
    """Pictures of one split with their labels: labels (n,) int64, class names by label."""

    labels: NDArray[np.int64]
    classes: tuple[str, ...]


def _rgb(image: Image.Image) -> Image.Image:
    """Three channels; transparency on white."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _cropped(array: Pixels, axis: int, side: int) -> Pixels:
    """The middle `side` rows or columns; black borders where there are fewer, the odd one first."""
    spare = array.shape[axis] - side
    if spare >= 0:
        return np.take(array, range(spare // 2, spare // 2 + side), axis=axis)
    before = (1 - spare) // 2
    widths = [(0, 0)] * array.ndim
    widths[axis] = (before, -spare - before)
    return np.pad(array, widths)
