"""Checks of the folders that a command reads and writes, made before any work."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from tempfile import mkdtemp

from featcal.cli.terminal import size_text
from featcal.errors import BadSetting, MissingPath
from featcal.settings import require

MODEL_CONFIGS = ("config.json", "open_clip_config.json")  # what makes a folder a model folder


def existing_folder(option: str, folder: Path) -> Path:
    """Return the folder. Raises: MissingPath; BadSetting for a file."""
    expected = "names a file; give the folder that holds it"
    require(not folder.is_file(), option, str(folder), expected)
    if not folder.is_dir():
        way_out = "check the path; download models of the hub first"
        raise MissingPath(folder, f"given with {option}", way_out)
    return folder


def new_folder(out: Path, force: bool, inputs: Iterable[Path]) -> None:
    """Check the folder to write; `force` replaces a model folder or an empty one.

    Raises: BadSetting, also for a folder that is read, holds one that is read or is inside one.
    """

    def check(condition: bool, expected: str) -> None:
        require(condition, "--out", str(out), expected)

    if out.is_symlink() and not out.exists():
        check(False, f"is a link to {out.readlink()}, which does not exist; remove it")
    path = out.resolve()
    for folder in (folder.resolve() for folder in inputs):
        holds = path in (folder, *folder.parents)
        check(not holds, "names, or holds, a folder that is read; name another one")
        expected = f"lies inside of {folder}, which is read; name another one"
        check(folder not in path.parents, expected)
    if not out.exists():
        return require_writable("--out", out)
    check(force, "names something that exists; name a new folder, or replace it with --force")
    # replacing a folder is safe only if it is clearly a model folder
    ours = out.is_dir() and (
        not any(out.iterdir()) or any((out / name).is_file() for name in MODEL_CONFIGS)
    )
    check(ours, "is not a model folder, so --force does not replace it; remove it by hand")


def require_work_folder(work: Path, out: Path, inputs: Iterable[Path]) -> None:
    """Check the scratch folder. Raises: BadSetting for a file or a folder used otherwise."""
    require(not work.is_file(), "--work", str(work), "names a file; name a folder")
    for folder in (folder.resolve() for folder in (*inputs, out)):
        inside = folder in (work.resolve(), *work.resolve().parents)
        expected = f"lies in {folder}, which is read or written as a whole; name another folder"
        require(not inside, "--work", str(work), expected)
    require_writable("--work", work / "run")


def stored_bytes(folder: Path) -> int:
    """Return the bytes of a folder's weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def require_space(option: str, folder: Path, needed: int) -> None:
    """Raise BadSetting unless so many bytes are free on the folder's disk."""
    parent = nearest_existing(folder)
    free = shutil.disk_usage(parent).free
    expected = (
        f"must be on a disk with {size_text(needed)} free; {parent} has {size_text(free)}; "
        "free some space, or name another folder"
    )
    require(free >= needed, option, str(folder), expected)


def require_writable(option: str, folder: Path) -> None:
    """Raise BadSetting unless a folder can be made here, by making one and removing it."""
    parent = nearest_existing(folder.absolute().parent)
    try:
        Path(mkdtemp(prefix=".featcal-", dir=parent)).rmdir()
    except OSError as error:
        reason = (error.strerror or "it cannot be used").lower()
        expected = f"must be a path that can be written ({parent}: {reason})"
        raise BadSetting(option, str(folder), expected) from None


def nearest_existing(folder: Path) -> Path:
    """Return the folder or the nearest of its parents that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())
