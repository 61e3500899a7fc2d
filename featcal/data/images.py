"""From a picture to what a vision model is given, in two steps: decoded once to uint8, normalised
when a batch is asked for.

Follows the folder's preprocessor_config.json, resized by PIL or by torchvision: transformers has
processors of both kinds, and published accuracies were measured with either. Pixels equal
transformers' own to the bit; those of the two kinds differ in some values by a few grey levels of
255.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from featcal.data.processors import Processor, steps
from featcal.data.tensor_resize import Pixels, tensor_resized
from featcal.errors import MissingPath
from featcal.storage.results import read_json


@dataclass(frozen=True)
class Preprocess:
    """Resize, centre crop, rescale, normalise; None leaves a step out.

    shortest: the short side after resizing.  resized: (height, width) instead, whatever the
    proportions.  crop: (height, width).
    processor: what resizes; it also says on which side of a crop larger than the picture the odd
    border lies.
    """

    shortest: int | None
    resized: tuple[int, int] | None
    crop: tuple[int, int] | None
    resample: int
    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    processor: Processor = "pil"

    @classmethod
    def from_folder(cls, folder: str | Path, processor: Processor = "pil") -> "Preprocess":
        """What preprocessor_config.json (or processor_config.json) of a model folder says. Raises:
        MissingPath, BadFile.
        """
        alone, joint = (
            Path(folder) / "preprocessor_config.json",
            Path(folder) / "processor_config.json",
        )
        path = alone if alone.is_file() else joint
        if not path.is_file():
            raise MissingPath(
                alone,
                "how images are prepared",
                "copy preprocessor_config.json of the base model there",
            )
        content = read_json(path)
        inner = (
            content.get("image_processor", {})
            if path is joint and isinstance(content, dict)
            else content
        )
        return cls(**steps(path, inner), processor=processor)

    def pixels(self, image: Image.Image) -> Pixels:
        """The picture resized and cropped, (3, H, W)."""
        image = _rgb(image)
        size = self._size(*image.size)
        if size is None:
            array = np.asarray(image, dtype=np.uint8)  # (h, w, 3)
        elif self.processor == "torchvision":
            array = tensor_resized(np.asarray(image, dtype=np.uint8), size, self.resample)
        else:
            array = np.asarray(image.resize(size[::-1], resample=self.resample), dtype=np.uint8)
        for axis, side in enumerate(self.crop or ()):
            array = _cropped(array, axis, side, odd_first=self.processor == "pil")
        return np.ascontiguousarray(array.transpose(2, 0, 1))

    def _size(self, width: int, height: int) -> tuple[int, int] | None:
        """(height, width) after resizing; None where pictures stay as they are."""
        if self.resized is not None or self.shortest is None:
            return self.resized
        long = int(self.shortest * max(width, height) / min(width, height))
        return (long, self.shortest) if width <= height else (self.shortest, long)

    def normalised(self, pixels: Pixels, device: torch.device | None = None) -> Tensor:
        """(n, 3, H, W) uint8 to float32: (x · factor − mean) / std, by a table of the 256 values
        each channel can have.

        device: where that is done, with the same values to the bit; a GPU is sent a quarter of the
        bytes.
        """
        mean, std = np.asarray(self.mean, np.float32), np.asarray(self.std, np.float32)
        values = (np.arange(256, dtype=np.float64) * self.factor).astype(np.float32)
        table = [(values - mean[channel]) / std[channel] for channel in range(pixels.shape[1])]
        if device is not None and device.type != "cpu":
            return looked_up(
                torch.from_numpy(np.array(pixels)).to(device),
                torch.from_numpy(np.stack(table)).to(device),
            )
        out = np.empty(pixels.shape, dtype=np.float32)
        for channel, own in enumerate(table):
            out[:, channel] = own[pixels[:, channel]]
        return torch.from_numpy(out)


def looked_up(pixels: Tensor, table: Tensor) -> Tensor:
    """Values (n, C, H, W) of pixels (n, C, H, W) uint8, by channel from `table` (C, 256)."""
    return torch.stack([own[pixels[:, channel].long()] for channel, own in enumerate(table)], dim=1)


class Rows(Protocol):
    """What holds decoded pictures: an array, a memory map, or something that decodes when
    indexed.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Pixels: ...


@dataclass(frozen=True)
class Pictures:
    """Pictures without labels: pixels (n, 3, H, W) uint8.

    device: where batches are made; the processor's memory where it is left out.
    """

    pixels: Rows
    preprocess: Preprocess
    device: torch.device | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return len(self.pixels)

    def tensor(self, indices: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """What a model is given for these pictures, (len(indices), 3, H, W) float32."""
        return self.preprocess.normalised(
            self.pixels[np.asarray(indices, dtype=np.int64)], self.device
        )

    def take(self, indices: Sequence[int] | NDArray[np.int64]) -> "Pictures":
        """The pictures with these indices alone, in their order."""
        return replace(self, pixels=self.pixels[np.asarray(indices, dtype=np.int64)])

    def batches(
        self, indices: Sequence[int] | NDArray[np.int64] | None, size: int
    ) -> Iterator[dict[str, Tensor]]:
        """Keyword dictionaries for a vision model's forward, in the order of `indices` (None: all
        pictures).
        """
        chosen = np.arange(len(self)) if indices is None else np.asarray(indices, dtype=np.int64)
        for start in range(0, len(chosen), size):
            yield {"pixel_values": self.tensor(chosen[start : start + size])}


@dataclass(frozen=True)
class ImageSet(Pictures):
    """Pictures of one split with their labels: labels (n,) int64, class names by label."""

    labels: NDArray[np.int64]
    classes: tuple[str, ...]

    def take(self, indices: Sequence[int] | NDArray[np.int64]) -> "ImageSet":
        """The pictures with these indices alone, in their order, with their labels."""
        chosen = np.asarray(indices, dtype=np.int64)
        return replace(self, pixels=self.pixels[chosen], labels=self.labels[chosen])


def _rgb(image: Image.Image) -> Image.Image:
    """Three channels; transparency on white."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _cropped(array: Pixels, axis: int, side: int, odd_first: bool) -> Pixels:
    """The middle `side` rows or columns; black borders where there are fewer, an odd one before or
    behind.
    """
    spare = array.shape[axis] - side
    if spare >= 0:
        return np.take(array, range(spare // 2, spare // 2 + side), axis=axis)
    before = (odd_first - spare) // 2
    widths = [(0, 0)] * array.ndim
    widths[axis] = (before, -spare - before)
    return np.pad(array, widths)
