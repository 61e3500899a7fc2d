"""Files and folders that appear complete or not at all.

Written under a hidden name beside the target and renamed at the end; on any exception, Ctrl-C too, the hidden one is removed.
Knows nothing of what is written.
"""

import errno
import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from featcal.errors import DiskFull

_counter = itertools.count()


@contextmanager
def atomic_path(path: str | Path, needed: int | None = None) -> Iterator[Path]:
    """A temporary path beside `path` (same suffix); renamed to `path` when the block ends, removed when it fails.

    Parents are made. Raises: DiskFull naming `path`, with `needed` bytes when given; what the block raises otherwise.
    """
    with _replacing(Path(path), needed) as hidden:
        yield hidden
        os.replace(hidden, path)


@contextmanager
def atomic_folder(path: str | Path, needed: int | None = None) -> Iterator[Path]:
    """A temporary folder beside `path`; takes its place when the block ends (an older folder goes), removed when it fails."""
    path = Path(path)
    with _replacing(path, needed) as hidden:
        hidden.mkdir()
        yield hidden
        if not path.exists():
            hidden.rename(path)
            return
        old = _hidden(path)
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
        if isinstance(error, DiskFull):  # of something written inside: named by where it was going to lie
            raise DiskFull(_final(Path(str(error.path)), hidden, path), error.needed) from error
        if _is_disk_full(error):
            raise DiskFull(path, needed) from error
        raise


def _hidden(path: Path) -> Path:
    # the suffix stays last because writers such as savefig choose their format by it
    return path.with_name(f".{path.stem}.{os.getpid()}-{next(_counter)}.part{path.suffix}")


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
    return type(error).__name__ == "SafetensorError" and ("StorageFull" in str(error) or "No space left" in str(error))

