"""What the commands print: results on standard output, progress and errors on standard error. Knows no commands."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

# soft_wrap below: a path broken over two lines can neither be copied nor searched for
output = Console(highlight=False)
progress = Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """One line of a result."""
    output.print(escape(text), soft_wrap=True)


def complain(text: str) -> None:
    """One clear message about what went wrong."""
    progress.print(f"[bold red]featcal:[/] {escape(text)}", soft_wrap=True)


def table(title: str, columns: list[str], rows: list[list[str]], numbers: bool = True) -> None:
    """A table; the first column is text, the others stand to the right when they are numbers."""
    if title:
        say(title)  # not the table's own title, which is folded to the table's width
    drawn = Table(box=None, pad_edge=False)
    for i, column in enumerate(columns):
        drawn.add_column(escape(column), justify="right" if i and numbers else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(escape(cell) for cell in row))
    output.print(drawn)


@contextmanager
def counted(total: int, what: str) -> Iterator[Callable[[str], None]]:
    """A function that takes one line per finished piece: a bar on a terminal, plain lines elsewhere."""
    if not progress.is_terminal:
        yield lambda text: progress.print(escape(text), soft_wrap=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=progress, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda text: bar.update(task, advance=1, description=escape(text))
