"""Read and write sources.json, which names the images and classes of every task, and load splits.

Decoded images are kept in .featcal/decoded of the project that holds the data, mapped by later
readers: pixels (n, 3, H, W) uint8 are numpy's file; labels and class names are JSON. The files are
named after split, source, preparation, code and PIL, and read without `datasets`. Data outside of a
project are decoded into memory every time.
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
from featcal.errors import MissingPath
from featcal.files import atomic_path, read_json, write_json
from featcal.settings import Settings
from reproduction.experiments import require_known
from reproduction.prepare.sentences import SentenceSet, load_sentences
from reproduction.prepare.suite import Processor
from reproduction.results import project_root

SOURCES = "sources.json"
WORTHWHILE = 2 << 30  # bytes; of a larger split that is not read whole nothing is kept
CHUNK = 64 << 20  # bytes that are decoded before they are written
SHOWN = 10.0  # seconds between two lines of a long decode
ABANDONED = 3600.0  # seconds without a byte after which nobody writes an unfinished file


class Source(Settings):
    """The images of one task.

    location: a folder below the data folder, or a hub id with revision and configuration.   splits:
    the source's name of train, validation, test.   columns: the source's names of image and label.
    """

    location: str
    kind: str  # "folder" | "hub"
    paper_name: str
    description: str
    classes: tuple[str, ...]
    templates: tuple[str, ...]
    splits: Mapping[str, str]
    revision: str | None = None
    config: str | None = None
    columns: Mapping[str, str] | None = None
    processor: Processor = "pil"

    def told(self) -> dict[str, Any]:
        """Return its entry in a file, with the processor where it is not the usual one."""
        return self.model_dump(exclude={"processor"} if self.processor == "pil" else set())


def write_sources(data: Path, sources: Mapping[str, Source]) -> None:
    """Write sources.json into the data folder."""
    write_json(data / SOURCES, {task: source.told() for task, source in sources.items()})


def read_sources(data: Path) -> dict[str, Source]:
    """Return every task of the data folder. Raises: MissingPath before the images are prepared."""
    raw: dict[str, dict[str, Any]] = read_json(data / SOURCES)
    return {
        task: Source.from_mapping(entry, f"{data / SOURCES}: {task}") for task, entry in raw.items()
    }


def load_task(data: Path, task: str, split: str, model: Path) -> ImageSet | SentenceSet:
    """Return one split of a task: images preprocessed for the model, or sentences in its tokens.

    data: a folder with sources.json, or with one folder of sentences for every task.   split:
    train, validation or test; of sentences also stream.   model: the folder of the model.
    Raises: UnknownKey for a task or split; whatever reading the rows raises.
    """
    if not (data / SOURCES).is_file() and (data / task).is_dir():
        return load_sentences(data / task, split, model)
    sources = read_sources(data)
    require_known(f"{data}: task", task, sources)
    source = sources[task]
    require_known(f"{task}: split", split, source.splits)
    hub: dict[str, Any] = {}
    if source.kind == "hub":
        hub = {name: getattr(source, name) for name in ("revision", "config", "columns")}
    location = source.location if hub else data / source.location
    preprocess = Preprocess.from_folder(model, source.processor)
    # models are scored on all of a split, but see a few hundred of its training images
    whole = split != "train"
    asked = Split(location, source.splits[split], preprocess, whole, source.classes, **hub)
    folder = decoded_folder(data)
    return mapped_images(folder, asked) if folder else asked.load()


def decoded_folder(data: Path) -> Path | None:
    """Return where decoded images are kept, apart from the outputs, which DVC removes.

    None for data in no project.
    """
    try:
        return project_root(data) / ".featcal" / "decoded"
    except MissingPath:
        return None


@dataclass(frozen=True)
class Split:
    """The arguments of load_images.   whole: whether all of it will be read."""

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
        """The split and its preparation, the same for every state of the source."""
        source = self.source if self.revision else Path(self.source).resolve()
        named = [self.classes and [*self.classes], sorted((self.columns or {}).items())]
        return json.dumps([str(source), self.name, self.config, self.preprocess.settings, *named])

    @property
    def state(self) -> str:
        """What else decides the bytes: the hub's commit or the state of every file of the folder
        (class names may be in any), code, PIL, transformers.
        """
        source: Any = self.revision
        if not source:
            walked = walk(Path(self.source), followlinks=True)
            files = sorted(Path(place) / name for place, _, names in walked for name in names)
            source = [(str(path), *_stamp(path.stat())) for path in files]
        return json.dumps([source, _code(), PIL.__version__, transformers.__version__])

    def load(self, **more: Any) -> ImageSet:
        """Load the split from its source. Raises: as load_images."""
        from featcal.data.images import load_images  # `datasets` takes seconds to import

        names = ("classes", "revision", "config", "columns")
        named: Any = {name: getattr(self, name) for name in names}
        return load_images(self.source, self.name, self.preprocess, **named, **more)


def mapped_images(folder: Path, split: Split) -> ImageSet:
    """Return the images of a split as load_images does, pixels read-only, and keep them in `folder`.

    Raises: as load_images, when they are decoded; DiskFull.
    """
    slot = _digest(split.asked)
    path = folder / f"{slot}-{_digest(split.state)}.npy"
    found = _mapped(path, split.preprocess)
    if found is None:
        images = split.load(in_memory=0)
        if not split.whole and len(images) * images.pixels[np.arange(1)].nbytes > WORTHWHILE:
            return images
        _write(path, images, f"{split.source} ({split.name})")
        _remove_others(folder, slot, path)
        found = _mapped(path, split.preprocess)
        assert found is not None, f"{path} was written and cannot be read"
    return found


def _mapped(path: Path, preprocess: Preprocess) -> ImageSet | None:
    """Return the images of a file; None unless it is there and whole."""
    try:
        known = json.loads(path.with_suffix(".json").read_text("utf-8"))
        pixels = np.load(path, mmap_mode="r").view(np.ndarray)
    except (OSError, ValueError, EOFError):
        return None
    return ImageSet(
        pixels, preprocess, np.array(known["labels"], np.int64), tuple(known["classes"])
    )


def _write(path: Path, images: ImageSet, place: str) -> None:
    """Decode everything into the file, a chunk at a time."""
    known = {"labels": images.labels.tolist(), "classes": list(images.classes)}
    write_json(path.with_suffix(".json"), known)
    count, first = len(images), images.pixels[np.arange(1)]
    header = {"descr": "|u1", "fortran_order": False, "shape": (count, *first.shape[1:])}
    rows, told = max(1, CHUNK // first.nbytes), time.monotonic()
    with atomic_path(path, first.nbytes * count) as hidden, hidden.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, count, rows):
            stop = min(start + rows, count)
            file.write(images.pixels[np.arange(start, stop)].data)
            if time.monotonic() - told > SHOWN:
                told = time.monotonic()
                print(f"  {place}: {stop} of {count} pictures decoded", file=sys.stderr)


def _remove_others(folder: Path, slot: str, path: Path) -> None:
    """Remove entries of earlier states of the split, and unfinished files."""
    for old in folder.glob(f"{slot}-*"):
        if old.stem != path.stem:
            with suppress(OSError):  # another process was first, or (Windows) still has it mapped
                old.unlink()
    for part in folder.glob(f".{slot}-*"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > ABANDONED:
                part.unlink()


def _stamp(found: stat_result) -> tuple[int, ...]:
    """Return what changes when a file is written in place (nobody can set ctime) or replaced."""
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


@cache
def _code() -> str:
    """Return a digest of the code that turns files into pixels."""
    files = [*sorted(Path(pictures.__file__).parent.glob("*.py")), Path(__file__)]
    return _digest("".join(file.read_text("utf-8") for file in files))


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:32]
