"""What several commands take on the command line, checked before anything is loaded: folders, `name=FOLDER` pairs, devices."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from featcal.errors import BadSetting, MissingPath
from featcal.settings import require

if TYPE_CHECKING:
    import torch

MODEL_CONFIGS = ("config.json", "open_clip_config.json")  # what makes a folder a model folder


def named_folders(option: str, pairs: Iterable[str]) -> dict[str, Path]:
    """`name=FOLDER` arguments as a dictionary. Raises: BadSetting for another form or a repeated name; MissingPath."""
    found: dict[str, Path] = {}
    for pair in pairs:
        name, equals, folder = pair.partition("=")
        if not (name and equals and folder):
            raise BadSetting(option, pair, f"must be name=FOLDER, for example {option} mnist=path/to/folder")
        if name in found:
            raise BadSetting(option, pair, f"names {name!r} a second time; every name once")
        found[name] = existing_folder(option, Path(folder))
    return found


def existing_folder(option: str, folder: Path) -> Path:
    """The folder. Raises: MissingPath when it is not there; BadSetting for a file."""
    require(not folder.is_file(), option, str(folder), "names a file; give the folder that holds it")
    if not folder.is_dir():
        raise MissingPath(folder, f"given with {option}", "check the path; names on the hub have to be downloaded first")
    return folder


def device_named(word: str) -> "torch.device":
    """What --device asks for. Raises: BadSetting."""
    from featcal.models.device import torch_device

    require(word in ("cpu", "cuda", "auto"), "--device", word, "must be cpu, cuda or auto")
    return torch_device(word)


def new_folder(out: Path, force: bool, inputs: Iterable[Path]) -> Path:
    """The folder to write. With `force` a model folder or an empty one may be replaced, but never one that is read.

    Raises: BadSetting.
    """
    if not out.exists():
        return out
    taken = [path.resolve() for path in inputs]
    if any(out.resolve() in (path, *path.parents) for path in taken):
        raise BadSetting("--out", str(out), "names, or holds, a folder that is read; name another one")
    if not force:
        raise BadSetting("--out", str(out), "names something that exists; name a new folder, or add --force to replace it")
    # renaming a whole folder away is safe only where it is clear what the folder is
    if not out.is_dir() or (any(out.iterdir()) and not any((out / name).is_file() for name in MODEL_CONFIGS)):
        raise BadSetting("--out", str(out), "names what is no model folder, which --force does not replace; remove it by hand")
    return out
