"""Decoded pictures of one split in a file below a cache folder: decoded by whoever comes first,
mapped by all who come later.

A safetensors file: labels (n,) int64, pixels (n, 3, H, W) uint8, class names in its header. Nothing
in it is trusted but what was written for the same split, source, preparation, code and PIL; reading
it takes neither `datasets` nor a decoder.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from os import stat_result, walk
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import transformers

from featcal.data import images as pictures
from featcal.data.images import ImageSet, Preprocess
from featcal.files import atomic_path

WORTHWHILE = (
    2 << 30
)  # bytes; of a larger split that is not read whole each picture is decoded when it is asked for
CHUNK = 64 << 20  # bytes that are decoded before they are written
TOLD = 10.0  # seconds between two lines of a long decode
ABANDONED = 3600.0  # seconds without a byte after which an unfinished file has nobody who writes it


@dataclass(frozen=True)
class Split:
    """One split as load_images is asked for it.

    whole: all of it will be read; a large one of which a few pictures are drawn is not worth its
    decoding and its place.
    """

    source: str | Path
    name: str
    preprocess: Preprocess
    whole: bool
    classes: Sequence[str] | None = None
    revision: str | None = None
    config: str | None = None
    columns: Mapping[str, str] | None = None

    @property
    def asked(self) -> str:
        """What is read, and how: the same for every state of the source."""
        source = self.source if self.revision else Path(self.source).resolve()
        named = [self.classes and [*self.classes], sorted((self.columns or {}).items())]
        return json.dumps([str(source), self.name, self.config, self.preprocess.settings, *named])

    @property
    def state(self) -> str:
        """What else decides the bytes: a commit of the hub or the state of every file of the
        folder, code, PIL, transformers.
        """
        source = self.revision or [
            (str(path), *_stamp(path.stat())) for path in _files(Path(self.source))
        ]
        return json.dumps([source, _code(), PIL.__version__, transformers.__version__])

    def load(self, **more: Any) -> ImageSet:
        """The split from its source. Raises: as load_images."""
        from featcal.data.images import load_images  # `datasets` takes seconds to import

        named = {
            "classes": self.classes,
            "revision": self.revision,
            "config": self.config,
            "columns": self.columns,
        }
        return load_images(self.source, self.name, self.preprocess, **named, **more)  # type: ignore[arg-type]


def mapped_images(folder: Path, split: Split) -> ImageSet:
    """The images of a split as load_images gives them, pixels read-only; kept in `folder` from the
    first time on.

    Raises: as load_images, when they are decoded; DiskFull.
    """
    slot, state = _digest(split.asked), _digest(split.state)
    path = folder / f"{slot}-{state}.safetensors"
    written_for = {"asked": split.asked, "state": state}
    found = _mapped(path, written_for, split.preprocess)
    if found is None:
        images = split.load(in_memory=0)
        if not split.whole and len(images) * images.pixels[np.arange(1)].nbytes > WORTHWHILE:
            return images
        _write(path, written_for, images, f"{split.source} ({split.name})")
        _remove_others(folder, slot, path)
        found = _mapped(path, written_for, split.preprocess)
        assert found is not None, f"{path} was written and cannot be read"
    return found


def _mapped(path: Path, written_for: Mapping[str, str], preprocess: Preprocess) -> ImageSet | None:
    """What the file holds; None unless it is there, whole, and written for this."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, size)))
            noted, (count, *shape) = header["__metadata__"], header["pixels"]["shape"]
            begin, end = 8 + length + 8 * count, 8 + length + header["pixels"]["data_offsets"][1]
            if size != end or {name: noted[name] for name in written_for} != written_for:
                return None
            labels = np.frombuffer(file.read(8 * count), "<i8").astype(np.int64)
        pixels = np.memmap(path, np.uint8, "r", begin, (count, *shape)).view(np.ndarray)
        return ImageSet(pixels, preprocess, labels, tuple(json.loads(noted["classes"])))
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _write(path: Path, written_for: Mapping[str, str], images: ImageSet, place: str) -> None:
    """Decode everything into the file, a chunk at a time."""
    count, first = len(images), images.pixels[np.arange(1)]
    labelled, whole = 8 * count, 8 * count + first.nbytes * count
    header = {
        "__metadata__": {**written_for, "classes": json.dumps(images.classes)},
        "labels": {"dtype": "I64", "shape": [count], "data_offsets": [0, labelled]},
        "pixels": {
            "dtype": "U8",
            "shape": [count, *first.shape[1:]],
            "data_offsets": [labelled, whole],
        },
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rows, told = max(1, CHUNK // first.nbytes), time.monotonic()
    with atomic_path(path, whole) as hidden, hidden.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + images.labels.astype("<i8").tobytes())
        for start in range(0, count, rows):
            stop = min(start + rows, count)
            file.write(images.pixels[np.arange(start, stop)].data)
            if time.monotonic() - told > TOLD:
                told = time.monotonic()
                print(f"  {place}: {stop} of {count} pictures decoded", file=sys.stderr)


def _remove_others(folder: Path, slot: str, path: Path) -> None:
    """Entries of earlier states of the same split, and files that somebody began and was
    stopped.
    """
    for old in folder.glob(f"{slot}-*"):
        if old != path:
            with suppress(OSError):  # another process was first, or (Windows) still has it mapped
                old.unlink()
    for part in folder.glob(f".{slot}-*"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > ABANDONED:
                part.unlink()


def _files(folder: Path) -> list[Path]:
    """All files below a folder: names of classes may stand in one, pictures in others than the
    split's own.
    """
    return sorted(
        Path(place) / name for place, _, names in walk(folder, followlinks=True) for name in names
    )


def _stamp(found: stat_result) -> tuple[int, ...]:
    """Changes with every way to change a file: written in place (times, of which nobody can set the
    second) or replaced.
    """
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


@cache
def _code() -> str:
    """The code that turns files into pixels: an edit of it must not find what the old one made."""
    folders = (Path(pictures.__file__).parent, Path(__file__).parent)
    files = [file for folder in folders for file in sorted(folder.glob("*.py"))]
    return _digest("".join(file.read_text("utf-8") for file in files))


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:32]
