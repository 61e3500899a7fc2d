"""Turn pictures into pixel values with transformers' own image processor, in two steps.

Each picture is resized and cropped once to uint8, and normalised whenever a batch is asked for.
Together the steps give the processor's own pixels, bit-identical.
"""

import json
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from zipfile import BadZipFile

import numpy as np
import torch
from huggingface_hub import constants
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from featcal.data import places
from featcal.data.places import IMAGE, LABEL, Location, open_images
from featcal.errors import BadData, BadSetting, MissingPath, as_bad_file, one_line

if TYPE_CHECKING:
    from datasets import Dataset

Pixels = NDArray[np.uint8]
Indices = Sequence[int] | NDArray[np.int64]
Rows = Any  # pictures: an array, a memory map, or an object that decodes when indexed
Backend = Literal["pil", "torchvision"]  # what resizes; published scores were measured with either
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
UNDECODABLE = (OSError, SyntaxError, ValueError, TypeError, struct.error, zlib.error)
UNDECODABLE += (Image.DecompressionBombError, BadZipFile, RuntimeError)  # of zip with a password
MEMBER = re.compile("^zip://[^:]*::")  # of a.png in an archive: zip://a.png::train.zip


@dataclass(frozen=True)
class Preprocess:
    """An image processor of transformers, in two steps: `pixels`, then `normalised`."""

    processor: Any

    @classmethod
    def from_folder(cls, folder: str | Path, backend: Backend = "pil") -> "Preprocess":
        """Load the image processor of a model folder. Raises: MissingPath, BadFile, BadSetting."""
        from transformers import AutoImageProcessor

        if backend == "torchvision":
            require_torchvision()
        path = next((p for name in PROCESSORS if (p := Path(folder) / name).is_file()), None)
        if path is None:
            way_out = f"copy {PROCESSORS[0]} of the base model there"
            raise MissingPath(Path(folder) / PROCESSORS[0], "the image processor", way_out)
        image = Image.fromarray(np.arange(2304).astype(np.uint8).reshape(24, 32, 3))
        file = "use the file that was saved with this model, or"
        python = "call featcal.calibrate from Python with batches of AutoImageProcessor's"
        with as_bad_file(path, "this image processor cannot be used", file, python):
            local: Any = {"local_files_only": True, "trust_remote_code": False}
            preprocess = cls(AutoImageProcessor.from_pretrained(folder, backend=backend, **local))
            expected = preprocess.processor(image, return_tensors="pt")["pixel_values"].float()
            if not torch.equal(preprocess.normalised(preprocess.pixels(image)[None]), expected):
                raise ValueError("it has steps other than resize, crop, rescale and normalise")
        return preprocess

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Return the processor's settings and backend, which decide the pixels."""
        return json.loads(self.processor.to_json_string()) | {"backend": self.processor.backend}

    def pixels(self, image: Image.Image) -> Pixels:
        """Return the picture in RGB, resized and cropped, (3, H, W)."""
        steps = {"do_convert_rgb": True, "do_rescale": False, "do_normalize": False}
        pixels = np.asarray(self.processor(image, **steps)["pixel_values"][0])
        if pixels.dtype != np.uint8 or pixels.ndim != 3:
            raise TypeError(f"pixels are {pixels.dtype} {pixels.shape}, not (3, H, W) of bytes")
        return np.ascontiguousarray(pixels)

    @cached_property
    def _table(self) -> NDArray[np.float32]:
        # the normalised value of each of 256 levels per channel, (3, 256)
        levels = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16)).convert("RGB")
        steps = {"do_resize": False, "do_center_crop": False, "do_pad": False}
        values = self.processor(levels, return_tensors="pt", **steps)["pixel_values"][0]
        return values.float().reshape(3, 256).numpy()

    def normalised(self, pixels: Pixels, device: torch.device | None = None) -> Tensor:
        """Return (n, 3, H, W) uint8 as float32, normalised as the processor does, on `device`."""
        if device is not None and device.type != "cpu":
            index, table = (torch.from_numpy(np.array(a)).to(device) for a in (pixels, self._table))
            return torch.stack([row[index[:, c].long()] for c, row in enumerate(table)], dim=1)
        out = np.empty(pixels.shape, dtype=np.float32)  # numpy is several times as fast here
        for c, values in enumerate(self._table):
            out[:, c] = values[pixels[:, c]]
        return torch.from_numpy(out)


def require_torchvision() -> None:
    """Raise BadSetting with a way out unless torchvision can be imported."""
    try:
        import torchvision.transforms.v2  # noqa: F401
    except ImportError:
        expected = "needs torchvision: pip install torchvision; or write processor: pil"
        raise BadSetting("data.processor", "torchvision", expected) from None


@dataclass(frozen=True)
class ImageSet:
    """Pictures of one split, with their labels if they are read; batches are made on `device`."""

    pixels: Rows  # (n, 3, H, W) uint8
    preprocess: Preprocess
    labels: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))  # (n,)
    classes: tuple[str, ...] = ()  # names by label
    occurring: bool = False  # the classes are those of these pictures, and there may be others
    device: torch.device | None = field(default=None, kw_only=True)
    dtype: torch.dtype = field(default=torch.float32, kw_only=True)  # of the model's input

    def __len__(self) -> int:
        return len(self.pixels)

    def tensor(self, indices: Indices) -> Tensor:
        """Return the model's input for these pictures, (len(indices), 3, H, W)."""
        pixels = self.pixels[np.asarray(indices, np.int64)]
        return self.preprocess.normalised(pixels, self.device).to(self.dtype)

    def take(self, indices: Indices) -> "ImageSet":
        """Return the pictures with these indices, in their order."""
        chosen = np.asarray(indices, dtype=np.int64)
        labels = self.labels[chosen] if len(self.labels) else self.labels
        return replace(self, pixels=self.pixels[chosen], labels=labels)

    def batches(self, indices: Indices | None, size: int) -> Iterator[dict[str, Tensor]]:
        """Yield keyword dictionaries for a vision model's forward; None takes all pictures."""
        chosen = np.arange(len(self)) if indices is None else np.asarray(indices, dtype=np.int64)
        for start in range(0, len(chosen), size):
            yield {"pixel_values": self.tensor(chosen[start : start + size])}


def load_images(
    source: str | Path,
    split: str,
    preprocess: Preprocess,
    *,
    classes: Sequence[str] | None = None,
    revision: str | None = None,
    config: str | None = None,
    columns: Mapping[str, str] | None = None,
    in_memory: int = 2 * 2**30,
) -> ImageSet:
    """Read one split of labelled pictures.

    Args:
        source: folder with <split>.parquet or <split>/<class>/; with `revision`, a hub data set.
        classes: names by label. Default: texts as labels, the label feature's, or README.md's.
        columns: the source's names of image and label, where they differ.
        in_memory: bytes up to which pictures are decoded now, else whenever they are asked for.
    Raises: as open_images; BadData for a wrong label or picture, or classes without names.
    """
    location, origin = Location(source, revision, config), f"{source} ({split})"
    table = open_images(location, split, True, columns)
    values = [*map(places.label_of, table.data.column(LABEL).to_pylist())]
    named = classes or places.in_order(value for value in values if isinstance(value, str))
    stored = getattr(table.features[LABEL], "names", None)
    names = places.given_or_stored(origin, named, stored, values) or _names_in_readme(Path(source))
    if not names:
        way_out = "use a ClassLabel feature, or write them into README.md (dataset_info), or"
        raise BadData(origin, "the classes have no names", way_out, "evaluate with --classes")
    origins = (f"{origin}, row {number}" for number in range(len(values)))
    labels = np.array(places.class_numbers(origins, values, names), np.int64)
    rows: Rows = EncodedRows(location, split, table, preprocess)
    if in_memory and len(labels) * rows[np.arange(1)].nbytes <= in_memory:
        rows = rows[np.arange(len(labels))]
    return ImageSet(rows, preprocess, labels, tuple(names), bool(named) and not classes)


class EncodedRows:
    """Pictures of a table, decoded when asked for by row number; no path leads out of its folder."""

    def __init__(self, location: Location, split: str, table: "Dataset", preprocess: Preprocess):
        self._origin = f"{location.source} ({split})"
        self._table, self._preprocess = table, preprocess
        self._first: tuple[int, tuple[int, ...]] | None = None  # row and shape of the first decoded
        source = Path(constants.HF_HUB_CACHE if location.on_hub else location.source)
        self._root = Path(os.path.abspath(source if source.is_dir() else source.parent))

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: Any) -> Pixels:
        rows = np.arange(len(self))[index].tolist()
        first = self._decoded(rows[0])
        out = np.empty((len(rows), *first.shape), dtype=np.uint8)
        out[0] = first
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # PIL decodes without the GIL
            for i, pixels in enumerate(pool.map(self._decoded, rows[1:]), start=1):
                out[i] = pixels
        return out

    def _decoded(self, row: int) -> Pixels:
        import datasets

        encoded, picture = self._table[row][IMAGE], f"the picture in row {row}"
        try:
            if encoded is None:
                raise ValueError("there is none")
            if encoded["bytes"] is None and encoded["path"]:
                member = "".join(MEMBER.findall(encoded["path"]))
                file, shown = encoded["path"].removeprefix(member), encoded["path"][:40]
                path = os.path.normpath(self._root / file)
                inside = any(map(Path(path).is_relative_to, (self._root, self._root.resolve())))
                if "://" in file or not inside:
                    raise ValueError(f"{shown!r} is outside of {self._root}")
                if not os.path.isfile(path):
                    raise ValueError(f"it is the text {shown!r}, which is the path of no file")
                encoded = {"bytes": None, "path": member + places.content_path(path)}
                picture = f"{(member + os.path.relpath(path, self._root))[-60:]} (row {row})"
            image = datasets.Image().decode_example(encoded)
            most = image.getextrema()[1] if image.mode[0] in "IF" else 0
            if most > 255 or (image.mode == "F" and 0 < most <= 1):  # fractions would be black
                raise ValueError("its values have more than 8 bits, 0 to 255; convert it to 8")
            pixels = self._preprocess.pixels(image)
        except UNDECODABLE as error:
            unknown = isinstance(error, UnidentifiedImageError)  # its message is an address
            reason = "no known format" if unknown else one_line(error)
            problem = f"{picture} cannot be decoded ({reason})"
            content = "the bytes of a PNG or JPEG (no base64), or its path inside the folder"
            raise BadData(self._origin, problem, f"store {content}, or drop the row") from None
        first, shape = self._first = self._first or (row, pixels.shape)
        if pixels.shape != shape:
            problem = f"row {row} is {pixels.shape[1:]} pixels, row {first} is {shape[1:]}"
            way_out = "give pictures of one size, or a preprocessor_config.json that crops them"
            raise BadData(self._origin, problem, way_out)
        return pixels


def _names_in_readme(folder: Path) -> list[str] | None:
    """Return the names in the dataset_info of a data set card, as the hub writes it."""
    from datasets.info import DatasetInfosDict

    way_out = "correct it, or remove the head"
    with as_bad_file(folder / "README.md", "its YAML head cannot be read", way_out):
        infos = DatasetInfosDict.from_directory(str(folder))
    features = (info.features or {} for info in infos.values())
    return next((f[LABEL].names for f in features if hasattr(f.get(LABEL), "names")), None)
