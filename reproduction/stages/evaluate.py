"""Stage `evaluate`: accuracy of every encoder of a role and pool on the test images or texts of each task."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from featcal.storage.results import packed, write_scores
from reproduction.experiments.runs import Pool, role_and_pool
from reproduction.stages.context import Context, load_context, recorded
from reproduction.stages.scored import Scored, scored
from reproduction.stages.scoring import Counts, score_models

BATCH = 250  # samples; accuracy does not depend on it


def run(key: str) -> None:
    """Write outputs/<suite>/scores/<key>.csv and .correct.csv; no rows where nothing plays the role."""
    context = load_context()
    role, pool = role_and_pool(key)
    with recorded(context, "evaluate", key):
        rows: list[dict[str, Any]] = []
        if context.plays(role, pool):
            scores = score(context, f"evaluate {key}", role, pool, scored(context, role, pool))
            rows = [row for own in scores.values() for row in own]
        write_scores(context.layout.scores(key), rows)


def score(context: Context, label: str, role: str, pool: Pool, models: Sequence[Scored]) -> dict[str, list[dict[str, Any]]]:
    """Result rows of every model by its name: one per task, with the words that the results call the model by."""
    return score_models(evaluate_model, context, label, role, pool, models, context.suite.tasks_of(role, pool))


def evaluate_model(context: Context, role: str, pool: Pool, model: Scored, corrected: Sequence[Scored]) -> dict[str, Counts]:
    """What one model (or each task's own expert) and adapters behind it get right on every task.

    Percent correct, number of samples, and of each whether it is right.
    """
    from safetensors.torch import load_file

    from featcal.data.images import ImageSet
    from featcal.evaluation.accuracy import Adapted, evaluate_pool, percent
    from featcal.models.device import torch_device
    from featcal.models.load import load_as_calibrated
    from featcal.rivals.adapters import Adapters
    from reproduction.suites.load_task import load_task

    layout, device = context.layout, torch_device(context.suite.device)
    tensors = load_file(layout.heads(role, pool))
    adapted: dict[str, Adapted] = {}
    for other in corrected:
        assert other.folder is not None  # only each task's own expert has none
        adapted[other.name] = (model.name, Adapters.load(other.folder).apply)
    shared = model.folder and load_as_calibrated(model.folder).to(device)  # type: ignore[arg-type]
    found: dict[str, Counts] = {other.name: {} for other in (model, *corrected)}
    for task in context.suite.tasks_of(role, pool):
        loaded = shared or load_as_calibrated(layout.expert(role, pool, task)).to(device)  # type: ignore[arg-type]
        samples = load_task(layout.data_of(role), task, "test", layout.base(role, pool))
        samples = replace(samples, device=device) if isinstance(samples, ImageSet) else samples
        heads = {task: tensors[f"head/{task}"]}
        judged = evaluate_pool({model.name: loaded}, {task: samples}, heads, tensors.get("visual_projection"), BATCH, adapted)
        for name, of_tasks in judged.items():
            right = of_tasks[task]
            found[name][task] = {"value": percent(right), "count": len(right), "correct": packed(right)}
    return found
