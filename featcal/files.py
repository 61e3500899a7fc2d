"""Files and folders that appear complete or not at all.

Written under a hidden name beside the target and renamed at the end; on any exception, Ctrl-C too,
the hidden one is removed. Folders of a process that was killed are removed by the next one that
writes to the same place. Knows nothing of what is written."""

import errno
import fcntl
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from featcal.errors import BadFile, DiskFull, MissingPath

_counter = itertools.count()


@contextmanager
def atomic_path(path: str | Path, needed: int | None = None) -> Iterator[Path]:
    """A temporary path beside `path` (same suffix); renamed to `path` when the block ends, removed
    when it fails.

    Parents are made. Raises: DiskFull naming `path`, with `needed` bytes when given; what the block
    raises otherwise.
    """
    with _replacing(Path(path), needed) as hidden:
        yield hidden
        os.replace(hidden, path)


@contextmanager
def atomic_folder(path: str | Path, needed: int | None = None) -> Iterator[Path]:
    """A temporary folder beside `path`; takes its place when the block ends (an older folder goes),
    removed when it fails.

    What killed processes have left of `path` goes first, so that the disk has its space again.
    """
    path = Path(path)
    remove_abandoned(path)
    with _replacing(path, needed) as hidden, _locked(hidden):
        yield hidden
        if not path.exists():
            hidden.rename(path)
            return
        old = _hidden(path, "old")
        path.rename(old)
        try:
            hidden.rename(path)
        except BaseException:
            old.rename(path)
            raise
        _remove(old)


@contextmanager
def _replacing(path: Path, needed: int | None) -> Iterator[Path]:
    """The hidden path, gone again unless renamed inside the block; a full disk becomes DiskFull."""
    hidden = _hidden(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield hidden
    except BaseException as error:
        _remove(hidden)
        if isinstance(
            error, DiskFull
        ):  # of something written inside: named by where it was going to lie
            raise DiskFull(_final(Path(str(error.path)), hidden, path), error.needed) from error
        if _is_disk_full(error):
            raise DiskFull(path, needed) from error
        raise


def remove_abandoned(path: Path) -> None:
    """Removes folders that killed processes have left beside `path`: unfinished ones, and the older
    one of a finished one.
    """
    stem, suffix = re.escape(path.stem), re.escape(path.suffix)
    ours = re.compile(
        rf"\.+{stem}(\.\d+-\d+|\.part|\.old)+{suffix}"
    )  # of a folder written inside of another, too
    older = re.compile(
        rf"\.{stem}\.\d+-\d+\.old{suffix}"
    )  # all there is, if the process died between two renames
    for left in path.parent.iterdir() if path.parent.is_dir() else ():
        kept = older.fullmatch(left.name) and not path.exists()
        if ours.fullmatch(left.name) and left.is_dir() and not kept:
            with suppress(OSError):  # of a folder that is in use the lock cannot be had
                lock = os.open(left, os.O_RDONLY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)
                finally:
                    os.close(lock)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Makes the folder and keeps others from removing it; the system lets go of the lock however
    this process ends.
    """
    folder.mkdir()
    lock = os.open(folder, os.O_RDONLY)
    try:
        with suppress(
            OSError
        ):  # a disk without locks grants none to those who would remove it, either
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _hidden(path: Path, kind: str = "part") -> Path:
    # the suffix stays last because writers such as savefig choose their format by it
    return path.with_name(f".{path.stem}.{os.getpid()}-{next(_counter)}.{kind}{path.suffix}")


def _final(inner: Path, hidden: Path, path: Path) -> Path:
    return path / inner.relative_to(hidden) if inner.is_relative_to(hidden) else inner


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_disk_full(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    # safetensors reports the operating system's error only inside its own message
    return type(error).__name__ == "SafetensorError" and (
        "StorageFull" in str(error) or "No space left" in str(error)
    )


_AGAIN = "make or copy it again"


def write_json(path: str | Path, content: Any) -> None:
    """JSON with two blanks of indentation, keys in the order given, and a final line end. Raises:
    BadFile on NaN.
    """
    try:
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise BadFile(
            path, "NaN or infinity among the values to write", "look at the numbers that lead here"
        ) from None
    with atomic_path(path) as hidden:
        hidden.write_text(text + "\n", encoding="utf-8", newline="\n")


def read_json(path: str | Path) -> Any:
    """What write_json wrote. Raises: MissingPath, BadFile."""
    if not Path(path).is_file():
        raise MissingPath(path, "a JSON file", _AGAIN)
    try:
        return json.loads(Path(path).read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadFile(path, f"not JSON ({error})", _AGAIN) from None


class Ledger:
    """A running sum and its peak."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0

    def add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    def remove(self, size: int) -> None:
        self.now -= size
        assert self.now >= 0, "more given back than was held"
