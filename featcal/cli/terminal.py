"""Print results to standard output, and progress and errors to standard error.

Of several processes that share a run (torchrun), only the first prints; each reports its own
mistakes. Bars and colours appear on terminals only; NO_COLOR switches colours off there too.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.text import Text

from featcal.errors import BadSetting

RANK = int(os.environ.get("RANK", "0") or "0")
# soft_wrap: a path broken over two lines can neither be copied nor searched for
STYLE: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False, "soft_wrap": True}
output = Console(quiet=RANK > 0, **STYLE)
progress = Console(stderr=True, quiet=RANK > 0, **STYLE)
errors = Console(stderr=True, **STYLE)
say = output.print  # one line of a result
# switches for the progress bars of other packages
BARS = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TQDM_DISABLE")

LOG = logging.getLogger("featcal")


class Warnings(logging.Handler):
    """Print the library's warnings; errors and notes of the log are printed by `complain` and `note`."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        if record.levelno == logging.WARNING:
            progress.print(record.getMessage())


LOG.addHandler(Warnings())


def show_progress(shown: bool) -> None:
    """Print progress or not; other packages' bars only where results go to a terminal too."""
    progress.quiet = RANK > 0 or not shown
    if not (shown and on_terminal()):
        for name in BARS:
            os.environ.setdefault(name, "1")


def on_terminal() -> bool:
    """Return whether results and progress both go to a terminal."""
    return progress.is_terminal and output.is_terminal


def say_json(content: Any) -> None:
    """Print the result as one JSON object."""
    say(json.dumps(content, indent=2, ensure_ascii=False))


def note(text: str) -> None:
    """Print and log one line that is not part of the result."""
    LOG.info(text)
    progress.print(text)


def complain(text: str) -> None:
    """Print and log one error message."""
    LOG.error(text)
    process = f"featcal (process {RANK}):" if RANK else "featcal:"
    errors.print(Text(process, "bold red"), text)


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
    """Print a table; all columns but the first are aligned right by default."""
    from rich.table import Table

    if title:
        say(title)  # rich would fold a title of its own to the width of the table
    grid = Table(box=None, pad_edge=False)
    for i, column in enumerate(columns):
        grid.add_column(column, justify="right" if i and right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    output.print(grid, soft_wrap=False)


@contextmanager
def progress_bar(total: int, title: str) -> Iterator[Callable[[str], None]]:
    """Yield a function to call with one line per finished step, which also shows the time left.

    Shows a bar on a terminal, and plain lines elsewhere.
    """
    begin, done = time.monotonic(), 0

    def finished(text: str) -> None:
        nonlocal done
        done += 1
        seconds = round((time.monotonic() - begin) / done * (total - done))
        left = f", about {timedelta(seconds=seconds)} left" if done < total else ""
        progress.print(f"{text}  ({done} of {total}{left})")

    if not on_terminal():
        yield finished
        return
    from rich import progress as bars

    columns = (
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
    )
    # by default the estimate of the time left forgets steps of more than half a minute
    how: dict[str, Any] = {"transient": True, "speed_estimate_period": float("inf")}
    with bars.Progress(*columns, console=progress, **how) as bar:
        task = bar.add_task(title, total=total)
        yield lambda text: bar.update(task, advance=1, description=text)


def size_text(size: int) -> str:
    """Return 1536 as "1.5 KiB"."""
    from pydantic import ByteSize

    return ByteSize(size).human_readable(separator=" ")
