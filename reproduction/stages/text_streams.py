"""The texts that a language model is calibrated on, or that its adapters see: a fixed draw of every task."""

from collections.abc import Callable
from functools import partial
from typing import Any

from reproduction.experiments.runs import Draw, Pool, Reading
from reproduction.stages.context import Context


def texts_of(context: Context, role: str, pool: Pool) -> tuple[None, Callable[[str, Draw, int], list[Any]]]:
    """No head, since a language model has its own, and the batches of a task for a draw and seed."""
    return None, partial(text_stream, context, role, pool)


def text_stream(
    context: Context, role: str, pool: Pool, task: str, draw: Draw, seed: int | None = None, reading: Reading | None = None
) -> list[Any]:
    """Batches of one task; `reading` as the method's own where None."""
    from reproduction.suites.text_batches import text_batches

    seed = draw.seed if seed is None else seed
    samples = 10**9 if draw.samples is None else draw.samples
    base = context.layout.base(role, pool)
    return text_batches(base, context.layout.texts, task, samples, seed, draw.batch, reading or Reading())


def text_streams(context: Context, role: str, pool: Pool, draw: Draw, reading: Reading) -> tuple[dict[str, Any], Any]:
    """Batches of every task, read as `reading` says, and the plan whose sums count the tokens that are asked for."""
    from reproduction.suites.text_batches import plan_of_reading

    tasks = context.suite.tasks_of(role, pool)
    batches = {task: text_stream(context, role, pool, task, draw, reading=reading) for task in tasks}
    return batches, plan_of_reading(context.layout.base(role, pool), reading)
