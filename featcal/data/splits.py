"""One split of a data set as a `datasets` table, wherever it lies: parquet files, a folder of pictures, or the hub.

Local files leave no cache behind. Pictures are not decoded here, and class names are only passed on.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import datasets
import pyarrow
from datasets.exceptions import DatasetGenerationError
from huggingface_hub import errors as hub_errors

from featcal.errors import BadData, HubUnreachable, MissingPath, TruncatedFile

SPLITS = ("train", "validation", "test")
IMAGE, LABEL = "image", "label"


def open_split(
    source: str | Path, split: str, revision: str | None, config: str | None, columns: Mapping[str, str]
) -> datasets.Dataset:
    """The columns image (encoded) and label of one split; `columns` renames the source's own to these.

    source: a local folder with <split>.parquet (or data/<split>-*.parquet) or <split>/<class>/<picture>; a hub id when a revision
            is given.
    Raises: MissingPath, TruncatedFile, HubUnreachable, BadData for a split or column that is not there
            and for a file without rows.
    """
    with quiet():
        table = _hub_split(str(source), split, revision, config) if revision else _local_split(Path(source), split)
    for own, ours in columns.items():
        if own in table.column_names:
            table = table.rename_column(own, ours)
    for wanted in (IMAGE, LABEL):
        if wanted not in table.column_names:
            problem = f"no column {wanted!r}; it has {', '.join(table.column_names)}"
            raise BadData(f"{source} ({split})", problem, f"rename the column that is the {wanted}")
    table = table.select_columns([IMAGE, LABEL])
    return table.cast_column(IMAGE, datasets.Image(decode=False))


def parquet_files(folder: Path, split: str) -> list[Path]:
    """The parquet files of a split, in order; none where the folder is laid out otherwise."""
    patterns = (f"{split}.parquet", f"{split}-*.parquet", f"data/{split}-*.parquet")
    found = (sorted(folder.glob(pattern)) for pattern in patterns)
    return next((files for files in found if files), [])


def picture_folders(folder: Path) -> dict[str, Path]:
    """Splits that are folders of class folders."""
    return {split: folder / split for split in SPLITS if (folder / split).is_dir()}


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


def _local_split(folder: Path, split: str) -> datasets.Dataset:
    if not folder.is_dir():
        raise MissingPath(folder, "a folder of images", "check the path; a hub data set needs a revision")
    files, pictures = parquet_files(folder, split), picture_folders(folder)
    if not files and split not in pictures:
        there = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
        way_out = f"put {split}.parquet or a folder {split}/<class>/ there (the folder has: {there})"
        raise MissingPath(folder / f"{split}.parquet", f"the split {split!r}", way_out)
    with TemporaryDirectory() as cache:
        options = {"cache_dir": cache, "keep_in_memory": True}
        try:
            if files:
                return datasets.Dataset.from_parquet([str(file) for file in files], **options)
            # all splits at once, so that a class without pictures in one split keeps its number
            patterns = {name: f"{path}/**" for name, path in pictures.items()}
            return datasets.load_dataset("imagefolder", data_files=patterns, drop_labels=False, **options)[split]
        except (DatasetGenerationError, pyarrow.ArrowInvalid) as error:
            reason = str(error.__cause__ or error).splitlines()[0]
            raise TruncatedFile(", ".join(map(str, files)) or folder / split, reason) from None
        except ValueError as error:  # among others a file without rows
            raise BadData(f"{folder} ({split})", str(error).splitlines()[0], "put at least one picture there") from None


def _hub_split(name: str, split: str, revision: str, config: str | None) -> datasets.Dataset:
    try:
        return datasets.load_dataset(name, config, split=split, revision=revision)
    except (OSError, hub_errors.HTTPError) as error:  # type: ignore[attr-defined]
        raise HubUnreachable(name, revision, str(error).splitlines()[0]) from None
    except ValueError as error:  # an unknown split or configuration; the message lists the known ones
        raise BadData(f"{name}@{revision}", str(error).splitlines()[0], "check split and configuration") from None
