"""Open the data of a task as a `datasets` table, from a file, a folder or the Hugging Face hub.

`datasets` reads every format. A data set of the hub is first brought into the hub's own cache at
one commit and then read like a folder, so that offline runs read the same commit or stop.
"""

import errno
import glob
import os
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from huggingface_hub import DatasetCard, constants, hf_hub_download, snapshot_download
from huggingface_hub import errors as hub_errors

from featcal import errors
from featcal.errors import BadData, BadFile, DiskFull, MissingPath, counted, list_of, one_line
from featcal.settings import require

if TYPE_CHECKING:
    from datasets import Dataset  # takes seconds to import, and decoded images need none of it

Kind = Literal["model", "dataset"]
Columns = Mapping[str, str] | None  # the column of a key of a sample, where its name differs
SPLITS = ("train", "validation", "test")
SPLIT_NAMES = (*SPLITS, "training", "val", "valid", "dev", "eval", "testing")  # in small letters
IMAGE, LABEL = "image", "label"
NOT_READ = (".heic", ".heif", ".avif", ".jxl", ".svg", ".dng")  # pictures that `datasets` skips
# JSON lines are parsed row by row
BUILDERS = dict.fromkeys((".jsonl", ".txt"), "text")
BUILDERS |= {f".{kind}": kind for kind in ("parquet", "csv", "json", "arrow")}
# in a CSV only an empty cell is missing: None and NA may be texts or classes. With `index_col`
# pandas warns of rows longer than the header; without, it shifts them by one column in silence
READING: dict[str, Any] = {"text": {"encoding": "utf-8-sig"}}
READING["csv"] = {"keep_default_na": False, "na_values": [""], "index_col": False}
READING["csv"] |= {"chunksize": 10**9}  # in parts, 007 becomes 7 where a part has only numbers
NO_ROWS = ("to no data", "at least one example", "No columns to parse", "BatchSize must be")
REASONS = dict.fromkeys(NO_ROWS, "it holds no sample") | {  # by part of what `datasets` says
    "Length of header": "a row is longer than the header; name all columns, quote texts with commas",
    "mixed types": "many rows of a column are numbers before its first text; write .jsonl instead",
}
LAYOUTS = ("{}.parquet", "{}-*.parquet", "data/{}-*.parquet")
LAYOUTS += ("{}.jsonl", "{}.txt", "{}.json", "{}.csv")
LAYOUTS += ("{}/data-*.arrow", "data-*.arrow")  # of save_to_disk in `datasets`
POINTER = b"version https://git-lfs.github.com/"  # begins a file whose content git has not brought
_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<config>[\w.-]+))?")
_NUMBER = re.compile(r"\d{1,99}")  # of a class; Python reads at most 4300 digits
_SPLIT = re.compile(r"\w[\w.-]*")
# of a picture in seg_test/, train2017/ or trainA/
_OF_SPLIT = re.compile(rf"(?i)([^/]*[^a-z/])?({'|'.join(SPLIT_NAMES)})(a|b|set)?([^a-z/][^/]*)?/")
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})[.-]")
_HIDDEN = re.compile(r"(^|/)(\.|__[^/]*/)")  # as `datasets` does


@dataclass(frozen=True)
class Location:
    """A local file or folder, or a data set of the hub with its revision and configuration."""

    source: str | Path
    revision: str | None = None  # None for files and folders
    config: str | None = None

    @property
    def on_hub(self) -> bool:
        """Return whether this is a data set of the hub."""
        return self.revision is not None

    @property
    def has_splits(self) -> bool:
        """Return whether it can have several splits: no file, saved table or flat folder can."""
        path = Path(self.source)
        flat = path.is_file() or any(path.glob("data-*.arrow"))
        return self.on_hub or not (flat or holds_splits(path) is False)

    @property
    def name(self) -> str:
        """Return the name for a card, which holds no path of the machine."""
        config = f":{self.config}" if self.config else ""
        local = Path(self.source).resolve().name
        return f"{self.source}@{self.revision}{config}" if self.on_hub else local


def location_of(option: str, name: str) -> Location:
    """Return an existing path, else the data set of the hub of this name. Raises: MissingPath."""
    path = Path(os.path.expanduser(name))  # no shell does that after NAME=
    if name and os.path.exists(path):  # False for a name that is too long
        return Location(path)
    hub = _HUB.fullmatch(name)
    if hub is None or ".." in name:
        forms = "owner/name, owner/name@revision or owner/name:configuration"
        way_out = f"check the path; a data set of the hub is {forms}"
        raise MissingPath(errors.shorten(name, 200), f"given with {option}", way_out)
    return Location(hub["name"], hub["revision"] or "main", hub["config"])


def open_table(location: Location, split: str, builders: Mapping[str, str] = BUILDERS) -> "Dataset":
    """Return all columns of one split; the lines of .jsonl and .txt files are its column `text`."""
    _require_split(split)
    if location.on_hub:
        folder, origin = _hub_folder(location), f"{location.source}@{location.revision}"
        return _read(origin, str(folder), split=split, name=location.config)
    path = Path(location.source)
    files = [path] if path.is_file() else split_files(path, split)
    if not files:
        layouts = f"{split}.parquet, .jsonl, .txt, .json or .csv"
        if (path / split).is_dir():
            problem = f"holds a folder {split}, as sets of pictures do, but this model reads texts"
            raise BadData(path, problem, f"give texts: {layouts}")
        raise _no_split(path, split, layouts)
    shards = {m[1]: int(m[2]) for file in files if (m := _SHARD.search(file.name))}
    if path.is_dir() and shards and {len(shards), *shards.values()} != {len(files)}:
        way_out = "remove shards of other tables and get missing ones, or name one file"
        names = list_of(file.name for file in files)
        raise BadData(path, f"its shards are not those of one table: {names}", way_out)
    every = [file for pattern in LAYOUTS for file in sorted(path.glob(pattern.format(split)))]
    if unread := [file.name for file in every if file not in files]:
        errors.warn_once(f"{path}: {files[0].name} is read, not {list_of(unread)}")
    builder = builders.get(files[0].suffix.lower())
    if builder is None:
        raise BadFile(files[0], "is no data file", f"give one of {', '.join(BUILDERS)}")
    options: Any = {"data_files": [glob.escape(content_path(f)) for f in files], "split": "train"}
    return _read(str(files[0]), builder, **options)


def content_path(file: str | Path) -> str:
    """Return the path of a file. Raises: BadFile while git-lfs has only a pointer in its place."""
    with suppress(OSError), open(file, "rb") as opened:  # who reads it names other problems
        if opened.read(len(POINTER)) == POINTER:
            raise BadFile(file, "holds a pointer of git-lfs", "run git lfs pull in its repository")
    return str(file)


def open_images(
    location: Location, split: str, labelled: bool, columns: Columns = None
) -> "Dataset":
    """Return the columns image (encoded) and, if `labelled`, label of one split."""
    import datasets
    import pyarrow

    _require_split(split)
    path, origin = Path(location.source), f"{location.source} ({split})"
    kinds = (".parquet", ".arrow") if (path / split).is_dir() else BUILDERS
    if location.on_hub or path.is_file() or split_files(path, split, kinds):
        table = open_table(location, split, BUILDERS | {".jsonl": "json"})
    else:
        table = _picture_folder(path, split, labelled)
    column_of = {name: (columns or {}).get(name, name) for name in (IMAGE, LABEL)[: 1 + labelled]}
    for name, column in column_of.items():
        if column not in table.column_names:
            problem = f"no column {column!r}; it has {list_of(table.column_names)}"
            raise BadData(origin, problem, f"name it, for all tasks, with --column {name}=COLUMN")
    table = table.select_columns(list(column_of.values()))
    table = table.rename_columns({column: name for name, column in column_of.items()})
    try:
        if isinstance(getattr(table.features[IMAGE], "feature", None), datasets.Value):
            raise ValueError("each is a flat list")  # becomes a picture of height 1
        return table.cast_column(IMAGE, datasets.Image(decode=False))
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        way_out = "store encoded pictures (PNG, JPEG) as the Image feature of `datasets` does"
        problem = f"the column image holds no pictures ({one_line(error)})"
        raise BadData(origin, problem, way_out) from None


def split_files(folder: Path, split: str, suffixes: Collection[str] = BUILDERS) -> list[Path]:
    """Return the data files of a split in order, of the first layout that the folder has."""
    for pattern in LAYOUTS:
        files = sorted(folder.glob(pattern.format(split)))
        if files and Path(pattern).suffix in suffixes:
            return files
    return []


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Silence the progress bars and the log of `datasets`, and the hub's bars."""
    import datasets
    import huggingface_hub.utils as hub

    with ExitStack() as restored:
        restored.callback(datasets.logging.set_verbosity, datasets.logging.get_verbosity())
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        for module in (datasets, hub):
            if not module.are_progress_bars_disabled():
                module.disable_progress_bars()
                restored.callback(module.enable_progress_bars)
        yield


def _picture_folder(folder: Path, split: str, labelled: bool) -> "Dataset":
    """Read pictures below <folder>/<split>/, or in the folder itself if it has no splits."""
    import datasets  # whose own reader takes archives, and of pictures those in a metadata.csv

    root, origin = folder / split, f"{folder} ({split})"
    if not root.is_dir():
        if holds_splits(folder) or labelled or not folder.is_dir():
            raise _no_split(folder, split, f"{split}.parquet or {split}/<class>/")
        root = folder
    if left := [file for file in root.rglob("*") if file.suffix.lower() in NOT_READ]:
        unread = f"{counted(len(left), 'file')} such as {left[0].name}"
        errors.warn_once(f"{origin}: {unread} cannot be read; convert to PNG or JPEG")
    files = pictures_in(root)
    if not files:
        raise BadData(origin, "holds no picture that can be read", "put PNG or JPEG files there")
    if odd := [file for file in files if re.search(r"[\ud800-\udfff]", file)]:
        raise BadData(origin, f"the name {odd[0]!a} is not text in UTF-8", "rename the file")
    columns = {IMAGE: [os.path.abspath(root / file) for file in files]}
    features = datasets.Features({IMAGE: datasets.Image(decode=False)})
    if labelled:
        if wrong := [file for file in files if file.count("/") != 1]:
            problem = f"{wrong[0]} is not directly in a class folder: no label"
            raise BadData(root, problem, f"put pictures into {split}/<class>/, not above or below")
        columns[LABEL] = [file.split("/")[0] for file in files]
        # of all splits, so that a class without pictures in one split keeps its number
        paths = (p for name in SPLIT_NAMES if name != split for p in pictures_in(folder / name))
        others = (path.split("/")[0] for path in paths if path.count("/") == 1)
        features[LABEL] = datasets.ClassLabel(names=in_order([*columns[LABEL], *others]))
    return datasets.Dataset.from_dict(columns, features)


def holds_splits(folder: Path) -> bool | None:
    """Return whether a folder has usual splits, or it or one in it has only pictures of splits;
    None if it has neither usual splits nor pictures.
    """
    several = any(sum((path / n).is_dir() for n in SPLITS) > 1 for path in folder.glob("[!.]*/"))
    if several or any((folder / n).is_dir() or split_files(folder, n) for n in SPLITS):
        return True
    files = pictures_in(folder)
    groups = groupby(files, lambda file: file.partition("/")[0])
    sets = [files, *([file.partition("/")[2] for file in group] for _, group in groups)]
    return any(own and all(map(_OF_SPLIT.match, own)) for own in sets) if files else None


def pictures_in(folder: Path) -> list[str]:
    """Return the paths of the pictures below a folder, in order, without hidden ones."""
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    suffixes, paths = tuple(ImageFolder.EXTENSIONS), list[str]()
    for top, folders, names in os.walk(folder, followlinks=True):
        above = {path.resolve() for path in (Path(top), *Path(top).parents)}
        folders[:] = [f for f in folders if Path(top, f).resolve() not in above]  # no loops
        paths += (os.path.relpath(f"{top}/{name}", folder) for name in names)
    return sorted(p for p in paths if p.lower().endswith(suffixes) and not _HIDDEN.search(p))


def in_order(names: Iterable[str]) -> list[str]:
    """Return class names sorted, each once; numbers by value, 10 after 2."""
    ordered = sorted({*names})
    return sorted(ordered, key=int) if all(map(_NUMBER.fullmatch, ordered)) else ordered


def label_of(value: Any) -> int | str | None:
    """Return a label as a number, or as a text without blanks around it; else None."""
    if isinstance(value, str):
        return value.strip() or None
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return int(value) if whole else None


def given_or_stored(origin: str, given: Any, stored: Any, labels: Iterable[Any]) -> Any:
    """Return the given names of classes, else the stored; these in another order stay as stored."""
    if not given or {*given} == {*(stored or ())}:
        return stored
    own = stored or sorted({label for label in labels if isinstance(label, int)})
    pairs = zip(given, map(str, stored or range(len(given))), strict=False)
    moved = any(name != now and name in map(str, own) for name, now in pairs)
    if len(given) != len(stored or given) or (moved and not stored):
        way_out = "leave them out, or give a word for each, in the order of labels 0, 1, ..."
        raise BadData(origin, f"the given classes do not fit its own: {list_of(own)}", way_out)
    if moved:
        errors.warn_once(f"{origin}: its classes are {list_of(own)}; check the order given")
    return given


def class_numbers(origins: Iterable[str], labels: Iterable[Any], names: Sequence[str]) -> list[int]:
    """Return the number of each label: its name's, else the label's own. Raises: BadData."""
    number_of: dict[Any, int] = {name: n for n, name in reversed([*enumerate(names)])}
    result = list[int]()
    for origin, label in zip(origins, labels, strict=True):
        result.append(number_of.get(label, int(label) if _NUMBER.fullmatch(f"{label}") else -1))
        if not 0 <= result[-1] < len(names):
            shown = errors.shorten(repr(label), 100)
            problem = f"its label {shown} is none of the classes {list_of(names)}"
            problem = "has no label" if label is None else problem
            way_out = "give a name or a number from 0 in every row, and all names with --classes"
            raise BadData(origin, problem, way_out, "for another column: --column label=COLUMN")
    return result


def _read(origin: str, builder: str, **options: Any) -> "Dataset":
    """Call load_dataset; local `data_files` are read into memory and leave no cache behind."""
    import datasets
    import pyarrow
    import yaml

    refused = (datasets.exceptions.DatasetsError, pyarrow.ArrowException, yaml.YAMLError)
    try:
        with quiet_datasets(), TemporaryDirectory() as cache, warnings.catch_warnings():
            warnings.filterwarnings("error", "Length of header or names|.*have mixed types")
            if "data_files" in options:
                options |= {"cache_dir": cache, "keep_in_memory": True} | READING.get(builder, {})
            else:  # a folder, whose card may say how its files are read
                made = datasets.load_dataset_builder(builder, options["name"])
                stated, default = vars(made.config), vars(type(made.config)())
                ours = READING.get(made.name, {}).items()
                options |= {k: value for k, value in ours if stated[k] == default[k]}
            return datasets.load_dataset(builder, **options)
    except (*refused, ValueError, RuntimeError, FileNotFoundError) as error:
        if getattr(error.__cause__, "errno", None) == errno.ENOSPC:
            raise DiskFull(options.get("cache_dir", datasets.config.HF_DATASETS_CACHE)) from None
        reason = one_line(error.__cause__ or error).rstrip(".")
        reason = next((said for part, said in REASONS.items() if part in reason), reason)
        kind = "a readable file (UTF-8, parquet, JSON lines or pictures) with at least one row"
        way_out = f"check that it is {kind}, and on the hub also its split and configuration"
        raise BadData(origin, f"cannot be read ({reason})", way_out) from None


def _hub_folder(location: Location) -> Path:
    """Bring the files of one configuration into the hub's cache; return the snapshot's folder."""
    from datasets.data_files import sanitize_patterns
    from datasets.utils.metadata import MetadataConfigs

    name = str(location.source)
    repository: dict[str, Any] = {"repo_type": "dataset", "revision": location.revision}
    searched = "; no file or folder of this name is here either"
    with quiet_datasets(), reaching(name, location.revision, searched, "dataset"):
        try:
            readme = hf_hub_download(name, "README.md", **repository)
            card = DatasetCard.load(readme, ignore_metadata_errors=True)
            configs = MetadataConfigs.from_dataset_card_data(card.data)
        except hub_errors.EntryNotFoundError:
            configs = MetadataConfigs()  # no README.md, or no connection
        config = location.config or (configs.get_default_config_name() if configs else None)
        files = configs.get(config, {}).get("data_files") if config else None
        if files is not None:
            patterns = [pattern for globs in sanitize_patterns(files).values() for pattern in globs]
            repository["allow_patterns"] = ["README.md", *patterns]
        return Path(snapshot_download(name, **repository))


@contextmanager
def reaching(
    name: str, revision: str | None, detail: str = "", kind: Kind = "model"
) -> Iterator[None]:
    """Turn the errors of the hub's client into ours; `detail` is added to the reason."""
    repo = f"{name}@{revision}" if revision else name
    page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name}"
    try:
        yield
    except (hub_errors.RepositoryNotFoundError, hub_errors.RevisionNotFoundError) as error:
        no_revision = isinstance(error, hub_errors.RevisionNotFoundError)
        missing = errors.NoRevision if no_revision else errors.NotOnHub
        problem = "the hub has no such repository or revision, or does not give it to you"
        login = "if it is private or has terms to accept, accept them there and run `hf auth "
        ways_out = [f"check owner, name and revision at {page}, and"]
        ways_out += [f"{login}login` with a token that may read it (or set HF_TOKEN)"]
        raise missing(repo, f"{problem} ({type(error).__name__}{detail})", *ways_out) from None
    except (OSError, hub_errors.HTTPError, hub_errors.XetDownloadError) as error:  # type: ignore[attr-defined]
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise DiskFull(constants.HF_HUB_CACHE) from None
        problem = "not in the local Hugging Face cache, and downloading it failed"
        problem = f"{problem} ({one_line(error, 120)}{detail})"
        again = "check the name or path, or run again with network access, or"
        copy = "copy a filled cache here and set HF_HOME to it (HF_HUB_OFFLINE=1 then forbids any "
        raise errors.HubUnreachable(repo, problem, again, f"{copy}connection)") from None


def _require_split(split: str) -> None:
    """Refuse a path as the name of a split, which could lead out of the data folder."""
    expected = "must be a name such as train: letters, digits, dots, dashes and underscores"
    require(bool(_SPLIT.fullmatch(split)), "split", split, expected)


def _no_split(folder: Path, split: str, layouts: str) -> MissingPath:
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    another = f"or name another folder or split, --split NAME (the folder has: {list_of(names)})"
    return MissingPath(folder / split, f"the split {split!r}", f"put {layouts} there, {another}")
