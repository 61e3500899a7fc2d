"""Print results to standard output, and progress and errors to standard error.

Of several processes that share a run (torchrun), only the first prints; each reports its own
mistakes. Bars and colours appear on terminals only; NO_COLOR switches colours off there too.
"""

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from rich.console import Console
from rich.markup import escape
from typer import Option

from featcal.errors import BadSetting

RANK = int(os.environ.get("RANK", "0") or "0")
# soft_wrap below: a path broken over two lines can neither be copied nor searched for
output = Console(highlight=False, quiet=RANK > 0)
progress = Console(stderr=True, highlight=False, quiet=RANK > 0)
errors = Console(stderr=True, highlight=False)
# switches for the progress bars of other packages
BARS = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TQDM_DISABLE")

Json = Annotated[bool, Option("--json", help="Print one JSON object instead of tables.")]

LOG = logging.getLogger("featcal")
LOG.addHandler(logging.NullHandler())  # without any, Python itself would print errors a second time


def set_quiet(quiet: bool) -> None:
    """Print progress, with other packages' bars on a terminal only, or results and errors alone."""
    progress.quiet = quiet or RANK > 0
    for name in BARS:
        if quiet:
            os.environ[name] = "1"
        elif not on_terminal():
            os.environ.setdefault(name, "1")


def on_terminal() -> bool:
    """Return whether results and progress both go to a terminal."""
    return progress.is_terminal and output.is_terminal


def say(text: str) -> None:
    """Print one line of a result."""
    output.print(escape(text), soft_wrap=True)


def say_json(content: Any) -> None:
    """Print the result as one JSON object."""
    say(json.dumps(content, indent=2, ensure_ascii=False))


def note(text: str) -> None:
    """Print and log one line that is not part of the result."""
    LOG.info(text)
    progress.print(escape(text), soft_wrap=True)


def complain(text: str) -> None:
    """Print and log one error message."""
    LOG.error(text)
    process = f"featcal (process {RANK}):" if RANK else "featcal:"
    errors.print(f"[bold red]{process}[/] {escape(text)}", soft_wrap=True)


def log_to(file: str, level: str) -> None:
    """Append our log and that of other packages to a file. Raises: BadSetting."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise BadSetting("--log-level", level, "must be debug, info, warning or error")
    try:
        handler = logging.FileHandler(file, encoding="utf-8")
    except OSError as error:
        reason = (error.strerror or "").lower()
        expected = f"must name a file that can be written ({reason})"
        raise BadSetting("--log-file", file, expected) from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.setLevel(number)
    logging.getLogger().addHandler(handler)
    LOG.setLevel(min(number, logging.INFO))


def table(title: str, columns: list[str], rows: list[list[str]], right: bool = True) -> None:
    """Print a table; all columns but the first are aligned right by default."""
    from rich.table import Table

    if title:
        say(title)  # rich would fold a title of its own to the width of the table
    grid = Table(box=None, pad_edge=False)
    for i, column in enumerate(columns):
        grid.add_column(escape(column), justify="right" if i and right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(escape(cell) for cell in row))
    output.print(grid)


@contextmanager
def progress_bar(total: int, title: str) -> Iterator[Callable[[str], None]]:
    """Yield a function to call with one line per finished step, which also shows the time left.

    Shows a bar on a terminal, and plain lines elsewhere.
    """
    if not on_terminal():
        yield plain_lines(total, lambda text: progress.print(escape(text), soft_wrap=True))
        return
    from rich import progress as bars

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
    )
    # by default the estimate of the time left forgets steps of more than half a minute
    how: dict[str, Any] = {"transient": True, "speed_estimate_period": float("inf")}
    with bars.Progress(*columns, console=progress, **how) as bar:
        task = bar.add_task(title, total=total)
        yield lambda text: bar.update(task, advance=1, description=escape(text))


def plain_lines(
    total: int, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Callable[[str], None]:
    """Return a function that writes each finished step, their number and the time left."""
    begin, ends = clock(), list[float]()

    def finished(text: str) -> None:
        ends.append(clock())
        done = len(ends)
        # the first step includes loading the models, so it counts only while it is the only one
        each = (ends[-1] - ends[0]) / (done - 1) if done > 1 else ends[0] - begin
        left = f", about {duration(each * (total - done))} left" if done < total else ""
        write(f"{text}  ({done} of {total}{left})")

    return finished


def duration(seconds: float) -> str:
    """Return 95 as "1 min 35 s"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


BINARY = {"TIB": 2**40, "GIB": 2**30, "MIB": 2**20, "KIB": 2**10}
UNITS = BINARY | {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1, "": 1}


def bytes_of(option: str, text: str) -> int:
    """Return the bytes of a size such as 8GiB, "500 MB" or 0. Raises: BadSetting."""
    size = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if size is None or size[2].upper() not in UNITS:
        raise BadSetting(option, text, "must be a number with a unit, such as 8GiB or 500MB")
    return int(float(size[1]) * UNITS[size[2].upper()])


def size_text(size: int) -> str:
    """Return 1536 as "1.5 KiB"."""
    for unit, one in BINARY.items():
        if size >= one:
            return f"{size / one:.1f} {unit.replace('IB', 'iB')}"
    return f"{size} B"


def count_text(count: int) -> str:
    """Return 2500000 as "2.5 M"."""
    for letter, digits in (("P", 15), ("T", 12), ("G", 9), ("M", 6), ("k", 3)):
        if count >= 10**digits:
            return f"{count / 10**digits:.1f} {letter}"
    return str(count)
