"""What the commands print: results on standard output, progress and errors on standard error. Knows
no commands.

Of several processes that share a run (torchrun) the first speaks; what only another one trips over,
it says itself. Bars and colours are for terminals alone; NO_COLOR switches colours off there too."""

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
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from typer import Option

from featcal.errors import BadSetting

RANK = int(os.environ.get("RANK", "0") or "0")
# soft_wrap below: a path broken over two lines can neither be copied nor searched for
output = Console(highlight=False, quiet=RANK > 0)
progress = Console(stderr=True, highlight=False, quiet=RANK > 0)
errors = Console(stderr=True, highlight=False)
BARS = (
    "HF_HUB_DISABLE_PROGRESS_BARS",
    "HF_DATASETS_DISABLE_PROGRESS_BARS",
    "TQDM_DISABLE",
)  # of the packages underneath

Json = Annotated[bool, Option("--json", help="Print one JSON object instead of tables.")]


def hush(quiet: bool) -> None:
    """--quiet: nothing but results and errors."""
    progress.quiet = quiet or RANK > 0
    for name in BARS if quiet else ():
        os.environ[name] = "1"


Quiet = Annotated[
    bool, Option("--quiet", "-q", help="No progress: only results and errors.", callback=hush)
]


def plain_without_terminal() -> None:
    """Where nobody looks, no package draws bars; what the environment says counts more."""
    if not shown_to_somebody():
        for name in BARS:
            os.environ.setdefault(name, "1")


def shown_to_somebody() -> bool:
    """Whether both streams are a terminal."""
    return progress.is_terminal and output.is_terminal


def say(text: str) -> None:
    """One line of a result."""
    output.print(escape(text), soft_wrap=True)


def say_json(content: Any) -> None:
    """The result as one JSON object."""
    say(json.dumps(content, indent=2, ensure_ascii=False))


LOG = logging.getLogger("featcal")
LOG.addHandler(logging.NullHandler())  # without any, Python itself would print errors a second time


def log_to(file: str, level: str) -> None:
    """From here on what is noted, and what the packages underneath log, is appended to a file.
    Raises: BadSetting.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise BadSetting("--log-level", level, "must be debug, info, warning or error")
    try:
        handler = logging.FileHandler(file, encoding="utf-8")
    except OSError as error:
        raise BadSetting(
            "--log-file",
            file,
            f"must name a file that can be written ({(error.strerror or '').lower()})",
        ) from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.setLevel(number)
    logging.getLogger().addHandler(handler)
    LOG.setLevel(min(number, logging.INFO))


def note(text: str) -> None:
    """One line beside the result."""
    LOG.info(text)
    progress.print(escape(text), soft_wrap=True)


def complain(text: str) -> None:
    """One clear message about what went wrong."""
    LOG.error(text)
    who = f"featcal (process {RANK}):" if RANK else "featcal:"
    errors.print(f"[bold red]{who}[/] {escape(text)}", soft_wrap=True)


def table(title: str, columns: list[str], rows: list[list[str]], numbers: bool = True) -> None:
    """A table; the first column is text, the others stand to the right when they are numbers."""
    if title:
        say(title)  # not the table's own title, which is folded to the table's width
    drawn = Table(box=None, pad_edge=False)
    for i, column in enumerate(columns):
        drawn.add_column(
            escape(column), justify="right" if i and numbers else "left", overflow="fold"
        )
    for row in rows:
        drawn.add_row(*(escape(cell) for cell in row))
    output.print(drawn)


@contextmanager
def counted(total: int, what: str) -> Iterator[Callable[[str], None]]:
    """A function that takes one line per finished piece: a bar on a terminal, plain lines
    elsewhere, both with the time left.
    """
    if not shown_to_somebody():
        yield plain_lines(total, lambda text: progress.print(escape(text), soft_wrap=True))
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # the estimate looks back over the whole run: by default it forgets pieces that took longer than
    # half a minute
    with Progress(
        *columns, console=progress, transient=True, speed_estimate_period=float("inf")
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda text: bar.update(task, advance=1, description=escape(text))


def plain_lines(
    total: int, show: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Callable[[str], None]:
    """A function that shows each finished piece with how many there are and how long the others
    will take.
    """
    begin, ends = clock(), list[float]()

    def line(text: str) -> None:
        ends.append(clock())
        done = len(ends)
        # the first piece took the loading of the models with it, so it counts only while it is the
        # only one
        each = (ends[-1] - ends[0]) / (done - 1) if done > 1 else ends[0] - begin
        left = f", about {duration(each * (total - done))} left" if done < total else ""
        show(f"{text}  ({done} of {total}{left})")

    return line


def duration(seconds: float) -> str:
    """95 as "1 min 35 s"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return (
        f"{whole // 60} min {whole % 60} s"
        if whole < 3600
        else f"{whole // 3600} h {whole % 3600 // 60} min"
    )


UNITS = {
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
COUNTS = (("P", 15), ("T", 12), ("G", 9), ("M", 6), ("k", 3))


def bytes_of(option: str, text: str) -> int:
    """`8GiB`, `500 MB`, `0`. Raises: BadSetting for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = found and UNITS.get(found[2].upper() or "B")
    if not (found and unit):
        raise BadSetting(option, text, "must be a number with a unit, such as 8GiB or 500MB")
    return int(float(found[1]) * unit)


def size_text(size: int) -> str:
    """1536 as "1.5 KiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= UNITS[unit.upper()]:
            return f"{size / UNITS[unit.upper()]:.1f} {unit}"
    return f"{size} B"


def count_text(count: int) -> str:
    """2500000 as "2.5 M"."""
    for letter, digits in COUNTS:
        if count >= 10**digits:
            return f"{count / 10**digits:.1f} {letter}"
    return str(count)
