"""Load splits of the tasks: decoded images, or short texts with labels in tokens.

sources.json names the images of every task; texts lie in one folder per task. Decoded images are
kept in .featcal/decoded of the project that holds the data, and mapped by later readers: pixels (n,
3, H, W) uint8 are numpy's file; labels and class names are JSON, with the state of source and code.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from hashlib import sha256
from operator import attrgetter
from os import walk
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from featcal.data import images as pictures
from featcal.data.images import ImageSet, Preprocess
from featcal.errors import BadFile, MissingPath
from featcal.files import atomic_path, read_json, write_json
from featcal.settings import Settings
from reproduction.experiments import require_known
from reproduction.prepare.suite import Processor
from reproduction.prepare.tasks import Prompts
from reproduction.results import project_root

SPLITS = ("train", "validation", "test", "stream")
LABELS = "labels.json"
TOKENS = 48  # maximum of a text, the two at its ends included


@dataclass(frozen=True)
class SentenceSet:
    """Texts, shortest first, so that batches of neighbours hold little padding.

    ids: tokens of every text.   labels: (n,), int64.   rows: of the file, (n,).
    first: position of every text's first token. Default: left to the model.
    """

    texts: tuple[str, ...]
    ids: tuple[list[int], ...]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    rows: NDArray[np.int64]
    tokenizer: Any
    first: int | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def batch(self, indices: Sequence[int] | NDArray[np.int64]) -> dict[str, Tensor]:
        """Return keywords of the model's forward, (n, longest): input_ids and attention_mask, and
        position_ids where texts have a first position.
        """
        from featcal.data.batches import padded

        ids, mask = padded([self.ids[index] for index in indices], self.tokenizer.pad_token_id)
        keywords = {"input_ids": ids, "attention_mask": mask}
        if self.first is not None:
            positions = torch.arange(self.first, self.first + ids.shape[1])
            keywords["position_ids"] = positions.expand_as(ids)
        return keywords

    def batches(
        self, indices: Sequence[int] | NDArray[np.int64] | None, size: int
    ) -> Iterator[dict[str, Tensor]]:
        """Yield batches in the order of `indices` (None: all texts)."""
        order = np.arange(len(self)) if indices is None else np.asarray(indices, dtype=np.int64)
        for start in range(0, len(order), size):
            yield self.batch(order[start : start + size])

    def take(self, indices: Sequence[int] | NDArray[np.int64]) -> "SentenceSet":
        """Return the texts with these indices, shortest first whatever the order of indices."""
        order = np.sort(np.asarray(indices, dtype=np.int64))
        texts, ids = (tuple(values[index] for index in order) for values in (self.texts, self.ids))
        arrays = {"labels": self.labels[order], "rows": self.rows[order]}
        return replace(self, texts=texts, ids=ids, **arrays)

    def reading(self, texts: Sequence[str]) -> "SentenceSet":
        """Return the set with other texts, in the same order."""
        return replace(self, texts=tuple(texts), ids=tokens(self.tokenizer, texts))


def tokens(tokenizer: Any, texts: Sequence[str]) -> tuple[list[int], ...]:
    """Return the token ids of every text, cut at TOKENS."""
    return tuple(tokenizer(list(texts), truncation=True, max_length=TOKENS)["input_ids"])


def load_sentences(folder: Path, split: str, model_folder: Path) -> SentenceSet:
    """Return one split of a task in the tokens of a model. Raises: as read_rows."""
    texts, labels, names = read_rows(folder, split)
    tokenizer = _tokenizer(str(model_folder))
    ids = tokens(tokenizer, texts)
    order = np.argsort([len(row) for row in ids], kind="stable")
    shortest_first = (tuple(values[index] for index in order) for values in (texts, ids))
    return SentenceSet(*shortest_first, labels[order], names, order, tokenizer)


def read_rows(folder: Path, split: str) -> tuple[list[str], NDArray[np.int64], tuple[str, ...]]:
    """Return texts and labels of one split of a task, in the order of the file, and its class names.

    Raises: MissingPath, UnknownKey, BadFile.
    """
    import pyarrow.parquet as pq  # not needed for images

    require_known(f"{folder.name}: split", split, SPLITS)
    file = folder / f"{split}.parquet"
    if not file.is_file():
        way_out = "it has the columns text and label; see reproduction/real_text"
        raise MissingPath(file, f"the {split} rows of a task", way_out)
    table = pq.read_table(file)
    if not {"text", "label"} <= set(table.column_names):
        problem = f"has the columns {', '.join(table.column_names)}"
        raise BadFile(file, problem, "give it the columns text and label")
    texts, labels = table["text"].to_pylist(), np.asarray(table["label"], dtype=np.int64)
    names = read_classes(folder).classes
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(names):
        problem = f"has a label outside of 0 … {len(names) - 1}"
        raise BadFile(file, problem, f"give {LABELS} one name for every label")
    return texts, labels, names


def read_classes(folder: Path) -> Prompts:
    """Return class names and templates. Raises: MissingPath, BadFile."""
    file, content = folder / LABELS, '{"classes": [...], "templates": ["{}"]}'
    if not file.is_file():
        raise MissingPath(file, "class names of a task", f"write {content} there")
    try:
        names = json.loads(file.read_text("utf-8"))
        return Prompts(tuple(map(str, names["classes"])), tuple(map(str, names["templates"])))
    except (ValueError, TypeError, KeyError):
        raise BadFile(file, "has no classes", f"it holds {content}") from None


@lru_cache(maxsize=2)
def _tokenizer(folder: str) -> Any:
    from featcal.models.load import load_tokenizer

    return load_tokenizer(folder)


SOURCES = "sources.json"
WORTHWHILE = 2 << 30  # bytes; of a larger split that is not read whole nothing is kept
CHUNK = 64 << 20  # bytes that are decoded before they are written
SHOWN = 10.0  # seconds between two lines of a long decode


class DataSource(Settings):
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

    def described(self) -> dict[str, Any]:
        """Return its entry in a file, with the processor where it is not the usual one."""
        return self.model_dump(exclude={"processor"} if self.processor == "pil" else set())


def write_sources(data: Path, sources: Mapping[str, DataSource]) -> None:
    """Write sources.json into the data folder."""
    write_json(data / SOURCES, {task: source.described() for task, source in sources.items()})


def read_sources(data: Path) -> dict[str, DataSource]:
    """Return every task of the data folder. Raises: MissingPath before the images are prepared."""
    raw: dict[str, dict[str, Any]] = read_json(data / SOURCES)
    return {
        task: DataSource.from_mapping(entry, f"{data / SOURCES}: {task}")
        for task, entry in raw.items()
    }


def class_names(folder: Path) -> tuple[str, ...]:
    """Return the class names of a local folder of pictures by label, without opening one."""
    unused: Any = None  # prepares pictures
    return pictures.load_images(folder, "train", unused, in_memory=0).classes


def load_task(data: Path, task: str, split: str, model: Path) -> ImageSet | SentenceSet:
    """Return one split of a task: images preprocessed for the model, or sentences in its tokens.

    data: a folder with sources.json, or with one folder of sentences for every task.
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
    requested = Split(location, source.splits[split], preprocess, whole, source.classes, **hub)
    try:  # apart from the outputs, which DVC removes
        folder = project_root(data) / ".featcal" / "decoded"
    except MissingPath:
        return requested.load()
    return mapped_images(folder, requested)


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
    def file(self) -> str:
        """Return the file's name: of the split and its preparation, for every state of the source."""
        source = self.source if self.revision else Path(self.source).resolve()
        options = [self.classes and [*self.classes], sorted((self.columns or {}).items())]
        parts = [str(source), self.name, self.config, self.preprocess.settings, *options]
        return f"{_digest(json.dumps(parts))}.npy"

    @property
    def state(self) -> str:
        """Return a digest of everything else that decides the bytes: the hub's commit, or the state
        of every file of the folder; code, PIL, transformers.
        """
        source: Any = self.revision
        if not source:
            walked = walk(Path(self.source), followlinks=True)
            files = sorted(Path(folder) / name for folder, _, names in walked for name in names)
            # these change when a file is written in place (nobody can set ctime) or replaced
            stats = attrgetter("st_size", "st_mtime_ns", "st_ctime_ns", "st_ino")
            source = [(str(path), *stats(path.stat())) for path in files]
        return _digest(json.dumps([source, _code(), PIL.__version__, transformers.__version__]))

    def load(self, **options: Any) -> ImageSet:
        """Load the split from its source. Raises: as load_images."""
        names = ("classes", "revision", "config", "columns")
        fields: Any = {name: getattr(self, name) for name in names}
        return pictures.load_images(self.source, self.name, self.preprocess, **fields, **options)


def mapped_images(folder: Path, split: Split) -> ImageSet:
    """Return the images of a split as load_images does, pixels read-only, and keep them in `folder`.

    Raises: as load_images, when they are decoded; DiskFull.
    """
    path, state = folder / split.file, split.state
    mapped = _mapped(path, state, split.preprocess)
    if mapped is None:
        images = split.load(in_memory=0)
        if not split.whole and len(images) * images.pixels[np.arange(1)].nbytes > WORTHWHILE:
            return images
        _write(path, state, images, f"{split.source} ({split.name})")
        mapped = _mapped(path, state, split.preprocess)
        assert mapped is not None, f"{path} was written and cannot be read"
    return mapped


def _mapped(path: Path, state: str, preprocess: Preprocess) -> ImageSet | None:
    """Return the images of a file; None unless it is there, whole and of this state."""
    try:
        content = json.loads(path.with_suffix(".json").read_text("utf-8"))
        pixels = np.load(path, mmap_mode="r").view(np.ndarray)
    except (OSError, ValueError, EOFError):
        return None
    if content["state"] != state:
        return None
    labels, classes = np.array(content["labels"], np.int64), tuple(content["classes"])
    return ImageSet(pixels, preprocess, labels, classes)


def _write(path: Path, state: str, images: ImageSet, label: str) -> None:
    """Decode everything into the file, a chunk at a time; its state is written last."""
    count, first = len(images), images.pixels[np.arange(1)]
    header = {"descr": "|u1", "fortran_order": False, "shape": (count, *first.shape[1:])}
    rows, reported = max(1, CHUNK // first.nbytes), time.monotonic()
    with atomic_path(path, first.nbytes * count) as hidden, hidden.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, count, rows):
            stop = min(start + rows, count)
            file.write(images.pixels[np.arange(start, stop)].data)
            if time.monotonic() - reported > SHOWN:
                reported = time.monotonic()
                print(f"  {label}: {stop} of {count} pictures decoded", file=sys.stderr)
    content = {"state": state, "labels": images.labels.tolist(), "classes": list(images.classes)}
    write_json(path.with_suffix(".json"), content)


@cache
def _code() -> str:
    """Return a digest of the code that turns files into pixels."""
    files = [*sorted(Path(pictures.__file__).parent.glob("*.py")), Path(__file__)]
    return _digest("".join(file.read_text("utf-8") for file in files))


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:32]
