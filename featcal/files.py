"""Write files and folders that appear complete or not at all.

The content is written under a hidden name in the same folder and renamed at the end.
"""

import errno
import fcntl
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from featcal.errors import BadFile, BadSetting, DiskFull, MissingPath

_counter = itertools.count()


@contextmanager
def atomic_path(path: str | Path, needed: int | None = None) -> Iterator[Path]:
    """Yield a temporary path with the same suffix; rename it to `path`, or remove it."""
    with _replacing(Path(path), needed) as hidden:
        yield hidden
        _move(hidden, path)


@contextmanager
def atomic_folder(path: str | Path, needed: int | None = None) -> Iterator[Path]:
    """Yield a temporary folder that replaces `path` (of a link, its target) unless the body fails.

    Leftovers of killed processes are removed first. Raises: DiskFull with `needed` bytes if given.
    """
    path = Path(path)
    here = not path.name  # "."
    path = path.resolve() if here or path.is_symlink() else path
    # dots and parts repeat for a folder that was written inside another; a process that dies
    # between its two renames leaves only the old folder, which is kept
    ends = r"\.\d+-\d+|\.part|\.old" if path.exists() else r"\.\d+-\d+|\.part"
    leftover = re.compile(rf"\.+{re.escape(path.stem)}\.\d+-\d+({ends})+{re.escape(path.suffix)}")
    remove_abandoned(file for file in path.parent.glob(".*") if leftover.fullmatch(file.name))
    with _replacing(path, needed) as hidden:
        hidden.mkdir()
        lock = os.open(hidden, os.O_RDONLY)
        try:
            locked(lock)  # released by the system if this process dies
            yield hidden
            old = _hidden(path, "old")
            try:
                if path.exists():
                    _move(path, old, path)
                _move(hidden, path)
                if here:
                    os.chdir(path)  # the old one is removed
            except BaseException:
                if old.exists():
                    _move(old, path)
                raise
            _remove(old)
        finally:
            os.close(lock)


@contextmanager
def _replacing(path: Path, needed: int | None) -> Iterator[Path]:
    """Yield a hidden path and remove it on failure; turn a full disk into DiskFull."""
    hidden = _hidden(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield hidden
    except BaseException as error:
        _remove(hidden)
        if isinstance(error, DiskFull) and Path(str(error.path)).is_relative_to(hidden):
            inner = Path(str(error.path)).relative_to(hidden)  # name its final path
            raise DiskFull(path / inner, error.needed) from error
        if _is_disk_full(error):
            raise DiskFull(path, needed) from error
        raise


def remove_abandoned(folders: Iterable[Path]) -> None:
    """Remove folders whose processes were killed; those in use are locked."""
    for folder in folders:
        with suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                if locked(lock, without=False):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


@contextmanager
def claimed(path: str | Path) -> Iterator[None]:
    """Let no other process write this file or folder inside the `with`. Raises: BadFile."""
    path = Path(path).absolute()
    file = path.with_name(f".{path.name}.lock")
    file.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as opened:
        claims = False  # a process that ends removes the file, maybe before we lock it
        while not claims:
            lock = opened.enter_context(file.open("a"))
            if not locked(lock):
                way_out = "wait until it has ended, or name another path"
                raise BadFile(path, "another featcal process is writing it", way_out)
            with suppress(FileNotFoundError):
                claims = os.path.samestat(os.fstat(lock.fileno()), file.stat())
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def require_apart(key: str, out: str | Path, inputs: Iterable[object]) -> None:
    """Raise BadSetting if the folder to write is, holds or lies inside a path among the inputs."""
    path = Path(out).resolve()
    for folder in (Path(item).resolve() for item in inputs if isinstance(item, str | Path)):
        problem = f"lies inside {folder}, which is read" if folder in path.parents else ""
        if path in (folder, *folder.parents):
            problem = "names, or holds, a folder that is read"
        if problem:
            raise BadSetting(key, str(out), f"{problem}; name another one")


def locked(file: int | IO[Any], without: bool = True) -> bool:
    """Lock an open file; return False if it is locked, `without` where locks do not exist."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return without and error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _move(source: Path, target: Path, named: Path | None = None) -> None:
    """Rename a file or folder. Raises: BadFile naming the target, or `named`."""
    try:
        os.replace(source, target)
    except OSError as error:
        if _is_disk_full(error):
            raise
        problem = f"its file system cannot rename what was written ({error.strerror})"
        way_out = "name a path on a local disk, and copy the result from there"
        raise BadFile(named or target, problem, way_out) from None


def _hidden(path: Path, kind: str = "part") -> Path:
    # the suffix stays last because writers such as savefig choose their format by it
    return path.with_name(f".{path.stem}.{os.getpid()}-{next(_counter)}.{kind}{path.suffix}")


def final_name(path: Path) -> str:
    """Return the name of a file or folder, of a hidden unfinished one the name it will have."""
    return re.sub(r"^\.(.+)\.\d+-\d+\.part(.*)$", r"\1\2", path.resolve().name)


def _remove(path: Path) -> None:
    with suppress(OSError):  # network file systems keep files that are open under another name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _is_disk_full(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    # safetensors reports the operating system's error only in its message
    full = "StorageFull" in str(error) or "No space left" in str(error)
    return type(error).__name__ == "SafetensorError" and full


def write_json(path: str | Path, content: Any) -> None:
    """Write JSON with two spaces of indentation and a final newline. Raises: BadFile on NaN."""
    try:
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError:
        problem = "NaN or infinity among the values to write"
        raise BadFile(path, problem, "check the inputs of this run for NaN") from None
    with atomic_path(path) as hidden:
        hidden.write_text(text + "\n", encoding="utf-8", newline="\n")


def read_json(path: str | Path) -> Any:
    """Read a JSON file. Raises: MissingPath, BadFile."""
    way_out = "make or copy it again"
    try:
        return json.loads(Path(path).read_text("utf-8"))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise MissingPath(path, "a JSON file", way_out) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadFile(path, f"not JSON ({error})", way_out) from None


def optional_json(file: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file; an empty one if there is none."""
    content = read_json(file) if file.is_file() else {}
    return content if isinstance(content, dict) else {}
