"""Models that a study makes, scores and forgets: where they lie meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from reproduction.stages.context import Context


@contextmanager
def room(context: Context, study: str) -> Iterator[Path]:
    """A folder for the models, on the disk of the outputs; gone when the block ends or fails."""
    context.layout.outputs.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{study}-", dir=context.layout.outputs) as folder:
        yield Path(folder)
