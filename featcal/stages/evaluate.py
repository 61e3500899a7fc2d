"""Stage `evaluate`: accuracy of every model of a role and pool, in one pass over each task's test images."""

from collections.abc import Sequence
from typing import Any

from featcal.stages.context import Context, load_context, recorded, role_and_pool
from featcal.stages.scored import Scored, scored
from featcal.stages.workers import fan_out
from featcal.storage.results import SCORES, write_rows

BATCH = 250  # images; accuracy does not depend on it


def run(key: str) -> None:
    """Write outputs/<suite>/scores/<key>.csv; no rows where nothing plays the role."""
    context = load_context()
    role, pool = role_and_pool(key)
    with recorded(context, "evaluate", key):
        rows: list[dict[str, Any]] = []
        if context.plays(role, pool):
            scores = score(context, f"evaluate {key}", role, pool, scored(context, role, pool))
            rows = [row for own in scores.values() for row in own]
        write_rows(context.layout.scores(key), rows, SCORES)


def score(context: Context, label: str, role: str, pool: int, models: Sequence[Scored]) -> dict[str, list[dict[str, Any]]]:
    """Result rows of every model by its name: one per task, with the words that the results call the model by."""
    tasks = context.suite.pool(pool)
    jobs = {task: (context, role, pool, task, models) for task in tasks}
    found = dict(fan_out(label, evaluate_task, jobs, context.suite.workers))
    common = {"suite": context.suite.name, "role": role, "pool": pool, "metric": "accuracy"}
    return {m.name: [{**common, **m.words, "task": task, **found[task][m.name]} for task in tasks] for m in models}


def evaluate_task(context: Context, role: str, pool: int, task: str, models: Sequence[Scored]) -> dict[str, dict[str, Any]]:
    """Percent correct and number of images of every model, adapters and the task's own expert included, on one task."""
    from safetensors.torch import load_file

    from featcal.baselines.adapters import Adapters
    from featcal.evaluation.accuracy import Adapted, evaluate_pool
    from featcal.models.device import torch_device
    from featcal.models.load import load_vision
    from featcal.suites.load_task import load_task

    layout = context.layout
    tensors = load_file(layout.heads(role, pool))
    images = load_task(layout.data, task, "test", layout.base(role, pool))
    device = torch_device(context.suite.device)
    loaded, adapted = {}, {}
    for model in models:
        folder = model.folder or layout.expert(role, pool, task)
        if model.behind:
            adapters: Adapted = (model.behind, Adapters.load(folder).apply)
            adapted[model.name] = adapters
        else:
            loaded[model.name] = load_vision(folder).to(device)
    heads = {task: tensors[f"head/{task}"]}
    counted = evaluate_pool(loaded, {task: images}, heads, tensors["visual_projection"], BATCH, adapted)
    right = {name: counts[task] for name, counts in counted.items()}
    return {name: {"value": 100 * correct / count, "count": count} for name, (correct, count) in right.items()}
