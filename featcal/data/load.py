"""Images of one split, with labels and class names, checked and decoded once; or the pictures
alone, decoded when asked for.
"""

import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet
import yaml
from huggingface_hub import constants
from numpy.typing import NDArray
from PIL import Image
from torch import get_num_threads

from featcal.data.images import ImageSet, Pictures, Pixels, Preprocess, Rows
from featcal.data.place import Place
from featcal.data.splits import (
    IMAGE,
    LABEL,
    SPLITS,
    open_pictures,
    open_split,
    parquet_files,
    picture_folders,
)
from featcal.errors import BadData, BadFile

IN_MEMORY = 2 * 2**30  # bytes of decoded pictures
_UNDECODABLE = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


def load_images(
    source: str | Path,
    split: str,
    preprocess: Preprocess,
    *,
    classes: Sequence[str] | None = None,
    revision: str | None = None,
    config: str | None = None,
    columns: Mapping[str, str] | None = None,
    in_memory: int = IN_MEMORY,
) -> ImageSet:
    """One split as an ImageSet.

    source:   a local folder (<split>.parquet, or <split>/<class>/<picture>); with `revision`, a
              data set of the hub.
    classes:  names by label; left out, those of the label feature or of the folder's README.md.
    columns:  the source's own column names -> image, label, where they differ.
    in_memory: bytes up to which the pictures are decoded now; those of a larger split whenever they
    are asked for.
    Raises:   MissingPath, TruncatedFile, HubUnreachable; BadData for a missing column, a label out
              of range, an undecodable
              picture (with its row), or classes without names.
    """
    place = f"{source} ({split})"
    table = open_split(source, split, revision, config, columns or {})
    names = _names(place, table, classes, Path(source))
    labels = _labels(place, table, len(names))
    rows: Rows = _Encoded(place, table, preprocess, None if revision else Path(source))
    if in_memory and len(labels) * rows[np.arange(1)].nbytes <= in_memory:
        rows = rows[np.arange(len(labels))]
    return ImageSet(rows, preprocess, labels, names)


def load_pictures(place: Place, split: str, preprocess: Preprocess) -> Pictures:
    """The pictures of one split without labels, each decoded whenever it is asked for. Raises: as
    load_images.
    """
    home = None if place.on_hub else Path(place.source)
    return Pictures(
        _Encoded(f"{place.source} ({split})", open_pictures(place, split), preprocess, home),
        preprocess,
    )


def class_names(folder: str | Path) -> tuple[str, ...]:
    """Class names of a local folder by label, without opening a picture. Raises: BadData when they
    are not written anywhere.
    """
    folder = Path(folder)
    for split in SPLITS:
        for file in parquet_files(folder, split)[:1]:
            schema = pyarrow.parquet.read_schema(file)
            names = getattr(
                datasets.Features.from_arrow_schema(schema).get(LABEL), "names", None
            ) or _names_in_readme(folder)
            return names and tuple(names) or _nameless(folder)
    pictures = {
        path.name
        for split in picture_folders(folder).values()
        for path in split.iterdir()
        if path.is_dir()
    }
    return tuple(sorted(pictures)) or _nameless(folder)


class _Encoded:
    """Pictures that are decoded whenever they are asked for, by an array of row numbers.

    home: the folder, or the file, that they come from, which a row must not name files outside of;
    None for the hub's cache.
    """

    def __init__(
        self, place: str, table: datasets.Dataset, preprocess: Preprocess, home: Path | None
    ):
        self._place, self._table, self._preprocess = place, table, preprocess
        self._first: tuple[int, tuple[int, ...]] | None = (
            None  # row and shape of the first picture decoded
        )
        folder = home if home is None or home.is_dir() else home.parent
        self._homes = (
            [constants.HF_HUB_CACHE, datasets.config.HF_DATASETS_CACHE]
            if folder is None
            else [folder]
        )

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: Any) -> Pixels:
        chosen = np.arange(len(self))[index]
        first = self._decoded(int(chosen[0]))
        self._require_one_size(int(chosen[0]), first)
        out = np.empty((len(chosen), *first.shape), dtype=np.uint8)
        out[0] = first

        def fill(i: int) -> None:
            pixels = self._decoded(int(chosen[i]))
            self._require_one_size(int(chosen[i]), pixels)
            out[i] = pixels

        # decoders and filters of PIL run beside each other in threads; every row is written in its
        # own place
        with ThreadPoolExecutor(get_num_threads()) as pool:
            for _ in pool.map(fill, range(1, len(chosen))):
                pass
        return out

    def _require_one_size(self, row: int, pixels: Pixels) -> None:
        """Every picture has the size of the one that was decoded first, in this call or in an
        earlier one.
        """
        self._first = self._first or (row, pixels.shape)
        first, shape = self._first
        if pixels.shape != shape:
            problem = f"row {row} is {pixels.shape[1:]} pixels, row {first} is {shape[1:]}"
            raise BadData(
                self._place,
                problem,
                "give pictures of one size, or a preprocessor_config.json that crops them",
            )

    def _decoded(self, row: int) -> Pixels:
        stored = self._table[row][IMAGE]
        name = f"the picture in row {row}"
        if stored and stored["bytes"] is None and stored["path"]:
            stored = {"bytes": None, "path": self._inside(row, stored["path"])}
            name = f"the picture in row {row}, {stored['path']},"
        try:
            return self._preprocess.pixels(datasets.Image().decode_example(stored))
        except _UNDECODABLE as error:
            raise BadData(
                self._place, f"{name} cannot be decoded ({error})", "repair or drop that row"
            ) from None

    def _inside(self, row: int, path: str) -> str:
        """A file that a row names instead of holding the picture, which must lie in the data's own
        folder.
        """
        homes = [Path(os.path.abspath(home)) for home in self._homes]
        place = os.path.normpath(homes[0] / path)
        if "://" in path or not any(Path(place).is_relative_to(home) for home in homes):
            way_out = "store the picture itself in the file, or a path inside of the folder"
            raise BadData(
                self._place, f"row {row} names {path}, which lies outside of {homes[0]}", way_out
            )
        return place


def _names(
    place: str, table: datasets.Dataset, given: Sequence[str] | None, folder: Path
) -> tuple[str, ...]:
    feature = table.features[LABEL]
    own = tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else None
    if given is None:
        found = own or _names_in_readme(folder)
        return tuple(found) if found else _nameless(place)
    if own is not None and len(own) != len(given):
        raise BadData(
            place,
            f"{len(given)} class names are given, but its labels have {len(own)}",
            "check the list of names",
        )
    return tuple(given)


def _nameless(place: object) -> tuple[str, ...]:
    way_out = "use a ClassLabel feature, write them into README.md (dataset_info), or pass classes="
    raise BadData(place, "the classes have no names", way_out)


def _names_in_readme(folder: Path) -> list[str] | None:
    """Names in the dataset_info of a data set card's YAML head, as the hub writes it."""
    readme = folder / "README.md"
    text = readme.read_text("utf-8") if readme.is_file() else ""
    if not text.startswith("---\n"):
        return None
    try:
        info = (yaml.safe_load(text[4:].split("\n---", 1)[0]) or {}).get("dataset_info") or {}
        features = (info[0] if isinstance(info, list) else info)["features"]
        names = next(f["dtype"]["class_label"]["names"] for f in features if f["name"] == LABEL)
        return [str(names[key]) for key in sorted(names, key=int)]
    except (KeyError, TypeError, StopIteration):
        return None  # a card without class names
    except (yaml.YAMLError, ValueError, AttributeError) as error:
        raise BadFile(
            readme, f"its YAML head cannot be read ({error})", "mend it, or remove the head"
        ) from None


def _labels(place: str, table: datasets.Dataset, classes: int) -> NDArray[np.int64]:
    values = table.data.column(LABEL).to_numpy()
    if values.dtype.kind not in "iub":  # kind b: some data sets store two classes as true and false
        what = (
            "are missing in some rows"
            if values.dtype.kind == "f"
            else f"are {table.features[LABEL].dtype}"
        )
        raise BadData(
            place, f"its labels {what}", "store labels as whole numbers from 0, one per row"
        )
    labels: NDArray[np.int64] = values.astype(np.int64)
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        problem = f"row {wrong[0]} has label {labels[wrong[0]]}, outside 0 to {classes - 1}"
        raise BadData(place, problem, "drop rows without a label, or check the class names")
    return labels
