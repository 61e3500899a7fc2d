"""Result rows of all models of a role and pool, whatever a model is given and however its answers are counted."""

from collections.abc import Callable, Sequence
from typing import Any

from reproduction.experiments.runs import Pool
from reproduction.stages.context import Context
from reproduction.stages.scored import Scored
from reproduction.stages.workers import fan_out

Counts = dict[str, dict[str, Any]]  # by task: value, count, correct (packed); metric, where that is not accuracy


def score_models(
    evaluate_one: Callable[..., dict[str, Counts]],
    context: Context,
    label: str,
    role: str,
    pool: Pool,
    models: Sequence[Scored],
    tasks: Sequence[str],
) -> dict[str, list[dict[str, Any]]]:
    """The rows that one way to evaluate a model, and adapters behind it, makes of all models.

    Each model is a job, with all adapters behind it: it is loaded once, and memory holds one of them in every worker.
    """
    jobs = {}
    for model in models:
        if not model.adapted_model:
            jobs[model.name] = (context, role, pool, model, [other for other in models if other.adapted_model == model.name])
    found: dict[str, Counts] = {}
    for _, counts in fan_out(label, evaluate_one, jobs, context.suite.workers):
        found |= counts
    common = {"suite": context.suite.name, "role": role, "pool": pool, "metric": "accuracy"}
    return {m.name: [{**common, **m.words, "task": task, **found[m.name][task]} for task in tasks] for m in models}
