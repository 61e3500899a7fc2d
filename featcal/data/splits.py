"""One split of a data set as a `datasets` table, wherever it lies: parquet files, a folder of
pictures, or the hub.

Local files leave no cache behind. Pictures are not decoded here, and class names are only passed
on.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import datasets
import pyarrow
from datasets.exceptions import DatasetGenerationError

from featcal.data.hub import hub_split
from featcal.data.place import Place, require_split
from featcal.errors import BadData, MissingPath, TruncatedFile

SPLITS = ("train", "validation", "test")
IMAGE, LABEL = "image", "label"
PICTURES = (
    ".bmp",
    ".gif",
    ".jpeg",
    ".jpg",
    ".pbm",
    ".pgm",
    ".png",
    ".ppm",
    ".tif",
    ".tiff",
    ".webp",
)


def open_split(
    source: str | Path,
    split: str,
    revision: str | None,
    config: str | None,
    columns: Mapping[str, str],
) -> datasets.Dataset:
    """The columns image (encoded) and label of one split; `columns` renames the source's own to
    these.

    source: a local folder with <split>.parquet (or data/<split>-*.parquet) or
    <split>/<class>/<picture>; a hub id when a revision
            is given.
    Raises: MissingPath, TruncatedFile, HubUnreachable, BadData for a split or column that is not
    there
            and for a file without rows.
    """
    require_split(split)
    with quiet():
        table = (
            hub_split(Place(source, revision, config), split)
            if revision
            else _local_split(Path(source), split)
        )
    for own, ours in columns.items():
        if own in table.column_names:
            table = table.rename_column(own, ours)
    return image_columns(table, (IMAGE, LABEL), f"{source} ({split})")


def open_pictures(place: Place, split: str) -> datasets.Dataset:
    """The column image (encoded) of one split: of a parquet file, a folder of them, the hub, or of
    pictures below a folder.

    Pictures lie in <folder>/<split>/, at any depth, or without a split's folder beside them in the
    folder itself.
    Raises: as open_split.
    """
    require_split(split)
    if (
        isinstance(place.source, Path)
        and place.source.is_dir()
        and not parquet_files(place.source, split)
    ):
        files = picture_files(place.source, split)
        return datasets.Dataset.from_dict(
            {IMAGE: [{"path": str(file.absolute()), "bytes": None} for file in files]},
            features=_PICTURE,
        )
    return image_columns(open_table(place, split), (IMAGE,), f"{place.source} ({split})")


def open_table(place: Place, split: str) -> datasets.Dataset:
    """All columns of one split of parquet files or of the hub. Raises: as open_split."""
    with quiet():
        if place.on_hub:
            return hub_split(place, split, _NOR_HERE)
        path = Path(place.source)
        files = [path] if path.is_file() else parquet_files(path, split)
        if not files:
            _no_split(path, split, f"{split}.parquet")
        return _read_parquet(files)


def image_columns(table: datasets.Dataset, wanted: Sequence[str], place: str) -> datasets.Dataset:
    """Only these columns, pictures as they are stored. Raises: BadData naming those that are
    there.
    """
    for name in wanted:
        if name not in table.column_names:
            problem = f"no column {name!r}; it has {', '.join(table.column_names)}"
            raise BadData(place, problem, f"rename the column that is the {name}")
    table = table.select_columns(list(wanted))
    try:
        return table.cast_column(IMAGE, datasets.Image(decode=False))
    except (pyarrow.ArrowInvalid, TypeError, ValueError) as error:
        raise BadData(
            place, f"the column image holds no pictures ({str(error).splitlines()[0]})", _STORE
        ) from None


_PICTURE = datasets.Features({IMAGE: datasets.Image(decode=False)})
_NOR_HERE = "; no file or folder of this name is here either"
_STORE = "store encoded pictures (PNG, JPEG) there, as the Image feature of `datasets` does"


def parquet_files(folder: Path, split: str) -> list[Path]:
    """The parquet files of a split, in order; none where the folder is laid out otherwise."""
    patterns = (f"{split}.parquet", f"{split}-*.parquet", f"data/{split}-*.parquet")
    found = (sorted(folder.glob(pattern)) for pattern in patterns)
    return next((files for files in found if files), [])


def picture_folders(folder: Path) -> dict[str, Path]:
    """Splits that are folders of class folders."""
    return {split: folder / split for split in SPLITS if (folder / split).is_dir()}


def picture_files(folder: Path, split: str) -> list[Path]:
    """Pictures of one split, sorted by path, hidden ones left out. Raises: MissingPath; BadData
    where there are none.
    """
    root = folder / split
    if not root.is_dir():
        if picture_folders(folder) or any(parquet_files(folder, name) for name in SPLITS):
            _no_split(folder, split, split)
        root = folder
    found = sorted(
        (path for path in root.rglob("*") if path.suffix.lower() in PICTURES and path.is_file()),
        key=str,
    )
    shown = [
        path
        for path in found
        if not any(part.startswith((".", "__")) for part in path.relative_to(root).parts)
    ]
    if not shown:
        raise BadData(
            root,
            "no pictures in this folder",
            "put pictures (PNG, JPEG, ...) there, or <split>.parquet",
        )
    return shown


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of datasets; as they were afterwards."""
    off = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not off:
            datasets.enable_progress_bars()


def _no_split(folder: Path, split: str, missing: str) -> NoReturn:
    there = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
    way_out = f"put {split}.parquet or a folder {split}/<class>/ there (the folder has: {there})"
    raise MissingPath(folder / missing, f"the split {split!r}", way_out)


def _local_split(folder: Path, split: str) -> datasets.Dataset:
    if not folder.is_dir():
        raise MissingPath(
            folder, "a folder of images", "check the path; a hub data set needs a revision"
        )
    files, pictures = parquet_files(folder, split), picture_folders(folder)
    if files:
        return _read_parquet(files)
    if split not in pictures:
        _no_split(folder, split, f"{split}.parquet")
    # all splits at once, so that a class without pictures in one split keeps its number
    patterns = {name: f"{path}/**" for name, path in pictures.items()}
    with TemporaryDirectory() as cache, _reading(folder / split):
        options = {"cache_dir": cache, "keep_in_memory": True}
        return datasets.load_dataset(
            "imagefolder", data_files=patterns, drop_labels=False, **options
        )[split]


def _read_parquet(files: Sequence[Path]) -> datasets.Dataset:
    with TemporaryDirectory() as cache, _reading(*files):
        return datasets.Dataset.from_parquet(
            [str(file) for file in files], cache_dir=cache, keep_in_memory=True
        )


@contextmanager
def _reading(*paths: Path) -> Iterator[None]:
    """Turns what `datasets` says of files it cannot read into TruncatedFile, of an empty one into
    BadData.
    """
    named = ", ".join(map(str, paths))
    try:
        yield
    except (DatasetGenerationError, pyarrow.ArrowInvalid) as error:
        raise TruncatedFile(named, str(error.__cause__ or error).splitlines()[0]) from None
    except ValueError as error:  # among others a file without rows
        raise BadData(named, str(error).splitlines()[0], "put at least one sample there") from None
