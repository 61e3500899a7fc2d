"""Open the data of a task as a `datasets` table, from a file, a folder or the Hugging Face hub.

`datasets` reads every format. A data set of the hub is first brought into the hub's own cache at
one commit and then read like a folder, so that offline runs read the same commit or stop.
"""

import errno
import glob
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from huggingface_hub import DatasetCard, constants, hf_hub_download, snapshot_download
from huggingface_hub import errors as hub_errors

from featcal.errors import (
    BadData,
    BadFile,
    BadSetting,
    DiskFull,
    HubUnreachable,
    MissingPath,
    NoRevision,
    NotOnHub,
)

if TYPE_CHECKING:
    from datasets import Dataset  # takes seconds to import, and decoded images need none of it

Kind = Literal["model", "dataset"]
COMMIT = re.compile(r"[0-9a-f]{40}")
SPLITS = ("train", "validation", "test")
IMAGE, LABEL = "image", "label"
BUILDERS = {".parquet": "parquet", ".jsonl": "text", ".txt": "text"}  # JSON is parsed row by row
_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<config>[\w.-]+))?")
_SPLIT = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True)
class Place:
    """A local file or folder, or a data set of the hub with its revision and configuration."""

    source: str | Path
    revision: str | None = None  # None for files and folders
    config: str | None = None

    @property
    def on_hub(self) -> bool:
        return self.revision is not None


def place_of(option: str, given: str) -> Place:
    """Return the path `given`, or the data set of the hub when no such path exists.

    Raises: MissingPath unless it exists or reads owner/name[@revision][:configuration].
    """
    if given and Path(given).exists():
        return Place(Path(given))
    hub = _HUB.fullmatch(given)
    if hub is None or ".." in given:
        way_out = "check the path; a data set of the hub is owner/name, owner/name@revision or owner/name:configuration"
        raise MissingPath(given, f"given with {option}", way_out)
    return Place(hub["name"], hub["revision"] or "main", hub["config"])


def open_table(place: Place, split: str) -> "Dataset":
    """Return all columns of one split; the lines of .jsonl and .txt files are its column `text`.

    Raises: MissingPath, BadFile, BadSetting, BadData, HubUnreachable, NotOnHub, DiskFull.
    """
    _require_split(split)
    if place.on_hub:
        folder, at = _hub_folder(place), f"{place.source}@{place.revision}"
        return _read(at, str(folder), None, split, name=place.config)
    path = Path(place.source)
    files = [path] if path.is_file() else split_files(path, split)
    if not files:
        _no_split(path, split, f"{split}.parquet, {split}.jsonl, {split}.txt or {split}/<class>/")
    if files[0].suffix not in BUILDERS:
        raise BadFile(files[0], "is no data file", f"give one of {', '.join(BUILDERS)}")
    options = {"encoding": "utf-8-sig"} if files[0].suffix != ".parquet" else {}
    return _read(str(files[0]), BUILDERS[files[0].suffix], files, "train", **options)


def open_images(
    place: Place, split: str, labelled: bool, columns: Mapping[str, str] | None = None
) -> "Dataset":
    """Return the columns image (encoded) and, if `labelled`, label of one split.

    columns: names of the source -> image, label, where they differ.
    Raises: as open_table; BadData for a missing column or one without pictures.
    """
    import datasets
    import pyarrow

    _require_split(split)
    path, at = Path(place.source), f"{place.source} ({split})"
    if place.on_hub or path.is_file() or split_files(path, split, (".parquet",)):
        table = open_table(place, split)
    else:
        table = _picture_folder(path, split, labelled)
    names = {own: new for own, new in (columns or {}).items() if own in table.column_names}
    table = table.rename_columns(names) if names else table
    wanted = [IMAGE, LABEL] if labelled else [IMAGE]
    for name in wanted:
        if name not in table.column_names:
            problem = f"no column {name!r}; it has {', '.join(table.column_names)}"
            raise BadData(at, problem, f"rename the column that is the {name}")
    try:
        return table.select_columns(wanted).cast_column(IMAGE, datasets.Image(decode=False))
    except (pyarrow.ArrowInvalid, TypeError, ValueError) as error:
        way_out = "store encoded pictures (PNG, JPEG) as the Image feature of `datasets` does"
        problem = f"the column image holds no pictures ({first_line(error)})"
        raise BadData(at, problem, way_out) from None


def split_files(
    folder: Path, split: str, suffixes: Collection[str] = tuple(BUILDERS)
) -> list[Path]:
    """Return the data files of a split in order, of the first layout that the folder has."""
    patterns = (f"{split}.parquet", f"{split}-*.parquet", f"data/{split}-*.parquet")
    patterns += (f"{split}.jsonl", f"{split}.txt")
    found = (
        sorted(folder.glob(pattern)) for pattern in patterns if Path(pattern).suffix in suffixes
    )
    return next((files for files in found if files), [])


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and the log of `datasets`, and the hub's bars."""
    import datasets
    import huggingface_hub.utils as hub

    shown, level = not datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    hub_shown = not hub.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    hub.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if shown:
            datasets.enable_progress_bars()
        if hub_shown:
            hub.enable_progress_bars()


def _picture_folder(folder: Path, split: str, labelled: bool) -> "Dataset":
    """Read pictures below <folder>/<split>/, or in the folder itself if it has no splits."""
    roots = [name for name in {split: 0, **dict.fromkeys(SPLITS)} if (folder / name).is_dir()]
    laid_out = roots or any(split_files(folder, name, (".parquet",)) for name in SPLITS)
    if split not in roots and (laid_out or labelled or not folder.is_dir()):
        _no_split(folder, split, f"{split}.parquet or {split}/<class>/")
    # all splits at once, so that a class without pictures in one split keeps its number
    used = {name: folder / name for name in (roots if labelled else roots[:1])} or {split: folder}
    files = {f"s{i}": f"{glob.escape(str(path))}/**" for i, path in enumerate(used.values())}
    at = f"{folder} ({split})"
    return _read(at, "imagefolder", files, "s0", drop_labels=not labelled)


def _read(
    at: str, builder: str, files: Sequence[Path] | Mapping[str, str] | None, split: str, **more: Any
) -> "Dataset":
    """Call load_dataset; local files are read into memory and leave no cache behind."""
    import datasets
    import pyarrow
    import yaml

    more |= {"split": split}
    try:
        with quiet(), TemporaryDirectory() as cache:
            if files is None:
                return datasets.load_dataset(builder, **more)
            given = files if isinstance(files, Mapping) else [glob.escape(str(f)) for f in files]
            local = {"data_files": given, "cache_dir": cache, "keep_in_memory": True}
            return datasets.load_dataset(builder, **local, **more)
    except (datasets.exceptions.DatasetsError, pyarrow.ArrowInvalid, ValueError) as error:
        reason = first_line(error.__cause__ or error).rstrip(".")
    except (RuntimeError, yaml.YAMLError, FileNotFoundError) as error:
        reason = first_line(error).rstrip(".")
    way_out = "check the file, its encoding (UTF-8) and that it has at least one row"
    if files is None:
        way_out = "check split and configuration, and that the data set is of files (parquet, JSON lines, pictures)"
    raise BadData(at, f"cannot be read ({reason[:300]})", way_out)


def _hub_folder(place: Place) -> Path:
    """Bring the files of one configuration into the hub's cache; return the snapshot's folder."""
    from datasets.data_files import sanitize_patterns
    from datasets.utils.metadata import MetadataConfigs

    name = str(place.source)
    given: dict[str, Any] = {"repo_type": "dataset", "revision": place.revision}
    with (
        quiet(),
        reaching(
            name, place.revision, "; no file or folder of this name is here either", "dataset"
        ),
    ):
        try:
            readme = hf_hub_download(name, "README.md", **given)
            card = DatasetCard.load(readme, ignore_metadata_errors=True)
            configs = MetadataConfigs.from_dataset_card_data(card.data)
        except hub_errors.EntryNotFoundError:
            configs = MetadataConfigs()  # no README.md, or no connection
        wanted = place.config or (configs.get_default_config_name() if configs else None)
        files = configs.get(wanted, {}).get("data_files") if wanted else None
        if files is None:
            return Path(snapshot_download(name, **given))
        patterns = [pattern for each in sanitize_patterns(files).values() for pattern in each]
        return Path(snapshot_download(name, allow_patterns=["README.md", *patterns], **given))


@contextmanager
def reaching(
    name: str, revision: str | None, more: str = "", kind: Kind = "model"
) -> Iterator[None]:
    """Turn the errors of the hub's client into ours; `more` is added to the reason.

    Raises: NotOnHub, NoRevision, HubUnreachable, DiskFull.
    """
    at = f"{name}@{revision}" if revision else name
    try:
        yield
    except hub_errors.GatedRepoError:
        page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name}"
        raise NotOnHub(
            at,
            f"the hub gives this repository only to those who have accepted its terms (GatedRepoError{more})",
            f"open {page}, log in, accept the terms and wait until access is granted,",
            "then run `hf auth login` on this machine, with a token that may read gated repositories (or set HF_TOKEN), or",
            "leave its role out: write `null` for it in the suite file",
        ) from None
    except (hub_errors.RepositoryNotFoundError, hub_errors.RevisionNotFoundError) as error:
        missing = NoRevision if isinstance(error, hub_errors.RevisionNotFoundError) else NotOnHub
        raise missing(
            at,
            f"the hub has no such repository or revision, or does not give it to you ({type(error).__name__}{more})",
            "check owner, name and revision on its page at https://huggingface.co, and",
            "where it is private or has terms to accept, accept them there and run `hf auth login`",
        ) from None
    except (OSError, hub_errors.HTTPError, hub_errors.XetDownloadError) as error:  # type: ignore[attr-defined]
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise DiskFull(constants.HF_HUB_CACHE) from None
        raise HubUnreachable(
            at,
            f"not in the local Hugging Face cache, and downloading it failed ({first_line(error)}{more})",
            "run again with network access (what was downloaded before is kept), or",
            "copy a filled cache here and set HF_HOME to it (HF_HUB_OFFLINE=1 then forbids any connection)",
        ) from None


def cached_commit(name: str, kind: Kind, revision: str) -> str | None:
    """Return the commit of a branch or tag when the hub was last asked; None if it never was."""
    if COMMIT.fullmatch(revision):
        return revision
    noted = Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.replace('/', '--')}" / "refs" / revision
    return noted.read_text("utf-8").strip() if noted.is_file() else None


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _require_split(split: str) -> None:
    """Refuse a path as the name of a split, which could lead out of the data folder."""
    if not _SPLIT.fullmatch(split):
        expected = (
            "must be a name such as train, made of letters, digits, dots, dashes and underscores"
        )
        raise BadSetting("split", split, expected)


def _no_split(folder: Path, split: str, expected: str) -> NoReturn:
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    way_out = f"put {expected} there, or name another split (the folder has: {', '.join(there) or 'nothing'})"
    raise MissingPath(folder / split, f"the split {split!r}", way_out)
