"""The folder that a command writes: checked before any work, its card, and the upload to the hub."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from featcal.cli.terminal import note, size_text
from featcal.errors import BadSetting, HubUnreachable
from featcal.settings import require

if TYPE_CHECKING:
    from featcal.data.places import Location


def new_folder(out: Path, force: bool, inputs: Iterable[Path]) -> None:
    """Check the folder to write; `force` replaces a model folder or an empty one.

    Raises: BadSetting, BadFile.
    """
    key, given = "--out", str(out)
    if out.is_symlink() and not out.exists():
        expected = f"is a link to {out.readlink()}, which does not exist; remove it"
        raise BadSetting(key, given, expected)
    path = out.resolve()
    for folder in (folder.resolve() for folder in inputs):
        holds = path in (folder, *folder.parents)
        require(not holds, key, given, "names, or holds, a folder that is read; name another one")
        expected = f"lies inside {folder}, which is read; name another one"
        require(folder not in path.parents, key, given, expected)
    if not out.exists():
        return require_writable(key, out)
    expected = "names something that exists; name a new folder, or replace it with --force"
    require(force, key, given, expected)
    from featcal.models.load import require_replaceable

    require_replaceable(out)


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


def stored_bytes(folder: Path) -> int:
    """Return the bytes of a folder's weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def require_hub(name: str | None) -> None:
    """Check before any work that the hub can be reached, accepts the name and knows the user."""
    if name is None:
        return
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]
    from huggingface_hub.utils import validate_repo_id

    from featcal.data.places import first_line

    try:
        validate_repo_id(name)
        HfApi().whoami()
    except HFValidationError:
        expected = "must be owner/name: letters, digits, dots, dashes, underscores"
        raise BadSetting("--push-to-hub", name, expected) from None
    except (HTTPError, OSError) as error:  # OSError: also a machine without a token
        raise HubUnreachable(
            name,
            f"the hub cannot be reached or does not know this user ({first_line(error)})",
            "run `hf auth login` with a token that may write (or set HF_TOKEN), or",
            "run again with network access and without HF_HUB_OFFLINE, or without the push",
        ) from None


def push(folder: Path, name: str | None) -> None:
    """Upload the folder if a name is given. Raises: HubUnreachable; the folder is complete then."""
    if name is None:
        return
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    from featcal.data.places import first_line

    try:
        url = HfApi().create_repo(name, exist_ok=True)
        message = f"featcal: {folder.name}"
        HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        problem = f"{folder} is complete, but the hub did not accept it ({first_line(error)})"
        way_out = f"upload it without computing it again: hf upload {name} {folder}"
        raise HubUnreachable(name, problem, way_out) from None
    note(f"on the hub: {url}")


def require_room(merged: Path, out: Path, work: Path | None) -> None:
    """Raise BadSetting unless the disks have room for the result and for finished blocks."""
    size = stored_bytes(merged)
    require_space("--out", out, size if work else 2 * size)
    if work:
        require_space("calibrate.work", work, size)


def add_to_card(
    folder: Path,
    datasets: "Mapping[str, Location]",
    split: str,
    kind: str,
    results: list[tuple[str, str, str, float]],
) -> None:
    """Add results (task, metric, name of the metric, value) to a model's card.

    kind: task type, as the hub names it. Raises: BadFile for a folder without a card.
    """
    from huggingface_hub import EvalResult

    from featcal.card import add_results

    entries = [
        EvalResult(
            task_type=kind,
            dataset_type=str(datasets[task].source) if datasets[task].on_hub else task,
            dataset_name=task,
            dataset_revision=datasets[task].revision,
            dataset_config=datasets[task].config,
            dataset_split=split,
            metric_type=metric,
            metric_name=name,
            metric_value=value,
        )
        for task, metric, name, value in results
    ]
    add_results(folder, entries)
