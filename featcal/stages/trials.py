"""Models that a study makes, scores and forgets: where they lie meanwhile, and their accuracy in one pass over test images."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from featcal.stages.context import Context
from featcal.stages.evaluate import evaluate_task
from featcal.stages.scored import Scored
from featcal.stages.workers import fan_out


@contextmanager
def room(context: Context, study: str) -> Iterator[Path]:
    """A folder for the models, on the disk of the outputs; gone when the block ends or fails."""
    context.layout.outputs.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{study}-", dir=context.layout.outputs) as folder:
        yield Path(folder)


def score(context: Context, label: str, role: str, pool: int, models: Sequence[Scored]) -> dict[str, list[dict[str, Any]]]:
    """Result rows of every model by its name: one per task, with the words that the results call the model by."""
    tasks = context.suite.pool(pool)
    jobs = {task: (context, role, pool, task, models) for task in tasks}
    found = dict(fan_out(f"{label}: evaluate", evaluate_task, jobs, context.suite.workers))
    common = {"suite": context.suite.name, "role": role, "pool": pool, "metric": "accuracy"}
    return {m.name: [{**common, **m.words, "task": task, **found[task][m.name]} for task in tasks] for m in models}
