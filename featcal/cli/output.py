"""Print on the terminal, check and upload the folder that a command writes, add results to cards.

Results go to standard output, progress and errors to standard error. Of several processes that
share a run (torchrun), only the first prints; each reports its own mistakes. Colours and the bars of
other packages appear on terminals only; NO_COLOR switches colours off there too.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from shlex import quote
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from pydantic import ByteSize
from rich.console import Console
from rich.text import Text

from featcal.card import add_results, read_record
from featcal.errors import LOG, BadSetting, HubUnreachable, one_line
from featcal.files import require_apart
from featcal.settings import require

if TYPE_CHECKING:
    from featcal.data.places import Location

RANK = int(os.environ.get("RANK", "0") or "0")
# soft_wrap: a path broken over two lines can neither be copied nor searched for
STYLE: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False, "soft_wrap": True}
output = Console(quiet=RANK > 0, **STYLE)
output.width = max(output.width, 80)  # in less, columns of a table would be single letters
progress = Console(stderr=True, quiet=RANK > 0, **STYLE)
errors = Console(stderr=True, **STYLE)
say = output.print  # one line of a result
Measured = tuple[str, str, str, float]  # task, metric, its name, value
# switches for the progress bars of other packages
BARS = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TQDM_DISABLE")
DRAW = ("seed", "split", "samples", "rows")  # keys of a record


class Warnings(logging.Handler):
    """Print the library's warnings; `complain` and `note` print errors and notes themselves."""

    def emit(self, record: logging.LogRecord) -> None:  # noqa: D102
        if record.levelno == logging.WARNING:
            progress.print(record.getMessage())


LOG.addHandler(Warnings())


def show_progress(shown: bool) -> None:
    """Print progress or not; other packages' bars only where results go to a terminal too."""
    progress.quiet = RANK > 0 or not shown
    if not (shown and progress.is_terminal and output.is_terminal):
        for name in BARS:
            os.environ.setdefault(name, "1")


def say_json(content: Any) -> None:
    """Print the result as one JSON object."""
    say(json.dumps(content, indent=2, ensure_ascii=output.encoding != "utf-8"))


def note(text: str) -> None:
    """Print and log one line that is not part of the result."""
    LOG.info(text)
    progress.print(text)


def complain(text: str) -> None:
    """Print and log one error message."""
    LOG.error(text)
    errors.print(Text(f"featcal (process {RANK}):" if RANK else "featcal:", "bold red"), text)


def log_to(file: str, level: str) -> None:
    """Append our log and that of other packages to a file. Raises: BadSetting."""
    try:
        handler = logging.FileHandler(file, encoding="utf-8")
    except OSError as error:
        expected = f"must name a file that can be written ({(error.strerror or '').lower()})"
        raise BadSetting("--log-file", file, expected) from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.setLevel(level.upper())
    logging.getLogger().addHandler(handler)
    LOG.setLevel(min(handler.level, logging.INFO))


def table(title: str, columns: list[str], rows: list[list[str]], right: bool = True) -> None:
    """Print a table that has rows; all columns but the first are aligned right by default."""
    from rich.table import Table

    if not rows:
        return
    if title:
        say(title)  # rich would fold a title of its own to the width of the table
    # a single space between columns: agreement with experts fits 80 characters
    grid = Table(box=None, pad_edge=False, collapse_padding=True)
    for i, column in enumerate(columns):
        grid.add_column(column, justify="right" if i and right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    output.print(grid, soft_wrap=False)


def progress_lines(total: int) -> Callable[[str], None]:
    """Return a function that prints one line per finished step, with the time that is left."""
    begin, done = time.monotonic(), 0

    def finished(text: str) -> None:
        nonlocal done
        done += 1
        seconds = round((time.monotonic() - begin) / done * (total - done))
        left = f", about {timedelta(seconds=seconds)} left" if done < total else ""
        progress.print(f"{text}  ({done} of {total}{left})")

    return finished


def size_text(size: int) -> str:
    """Return 1536 as "1.5 KiB"."""
    return ByteSize(size).human_readable(separator=" ")


def new_folder(out: Path, force: bool, inputs: Iterable[Path]) -> None:
    """Check the folder to write; `force` replaces a model folder or an empty one."""
    key, name = "--out", str(out)
    if out.is_symlink() and not out.exists():
        expected = f"is a link to {out.readlink()}, which does not exist; remove it"
        raise BadSetting(key, name, expected)
    require_apart(key, out, inputs)
    if not out.exists():
        return require_writable(key, out)
    expected = "names something that exists; name a new folder, or replace it with --force"
    require(force, key, name, expected)
    from featcal.models.load import require_replaceable

    require_replaceable(out)


def require_space(option: str, folder: Path, needed: int) -> None:
    """Raise BadSetting unless so many bytes are free on the folder's disk."""
    parent = nearest_existing(folder.absolute())
    free = shutil.disk_usage(parent).free
    least = f"must be on a disk with {size_text(needed)} free; {parent} has {size_text(free)}"
    expected = f"{least}; free some space, or name another folder"
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
    """Return an absolute folder or the nearest of its parents that exists."""
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

    try:
        validate_repo_id(name)
        HfApi().whoami()
    except HFValidationError:
        expected = "must be owner/name: letters, digits, dots, dashes, underscores"
        raise BadSetting("--push-to-hub", name, expected) from None
    except (HTTPError, OSError) as error:  # OSError: also a machine without a token
        problem = f"the hub cannot be reached or does not know this user ({one_line(error)})"
        login = "run `hf auth login` with a token that may write (or set HF_TOKEN), or"
        again = "run again with network access and without HF_HUB_OFFLINE, or without the push"
        raise HubUnreachable(name, problem, login, again) from None


def push(folder: Path, name: str | None) -> None:
    """Upload the folder if a name is given. Raises: HubUnreachable; the folder is complete then."""
    if name is None:
        return
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    try:
        url = HfApi().create_repo(name, exist_ok=True)
        old = ["model.safetensors*", "model-*-of-*.safetensors"]  # transformers might load these
        how: Any = {"repo_id": url.repo_id, "delete_patterns": old}
        HfApi().upload_folder(folder_path=folder, commit_message=f"featcal: {folder.name}", **how)
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        problem = f"{folder} is complete, but the hub did not accept it ({one_line(error)})"
        way_out = f"upload it without computing it again: hf upload {name} {quote(str(folder))}"
        raise HubUnreachable(name, problem, way_out) from None
    note(f"on the hub: {url}")


def require_room(merged: Path, out: Path, work: Path | None) -> None:
    """Raise BadSetting unless the disks have room for the result and for finished blocks."""
    size = stored_bytes(merged)
    require_space("--out", out, size if work else 2 * size)
    if work:
        require_space("calibrate.work", work, size)


def recorded_draws(folder: Path) -> list[dict[str, Any]]:
    """Return which samples a folder's merge and calibrations drew, the last of them first."""
    record = read_record(folder)
    last = [{k: record.get(k, {}) for k in DRAW}] if "samples" in record else []
    return last + record.get("earlier", [])


def add_to_card(
    folder: Path, datasets: "Mapping[str, Location]", split: str, kind: str, results: list[Measured]
) -> None:
    """Add results to a model's card. Raises: BadFile."""
    from huggingface_hub import EvalResult

    entries = []
    for task, metric, name, value in results:
        data = datasets[task]
        kind_of_data = str(data.source) if data.on_hub else task
        source = {"dataset_revision": data.revision, "dataset_config": data.config}
        source |= {"dataset_split": split if data.has_splits else None, "metric_name": name}
        entries.append(EvalResult(kind, kind_of_data, task, metric, value, **source))
    add_results(folder, entries)
