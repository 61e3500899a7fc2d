"""Stage `evaluate`: accuracy of every model of a role and pool, in one pass over each task's test images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from featcal.stages.context import Context, load_context, recorded, role_and_pool
from featcal.stages.workers import fan_out
from featcal.storage.results import SCORES, write_rows

BATCH = 250  # images; accuracy does not depend on it


def run(key: str) -> None:
    """Write outputs/<suite>/scores/<key>.csv; no rows where nothing plays the role."""
    context = load_context()
    role, pool = role_and_pool(key)
    with recorded(context, "evaluate", key):
        rows: list[dict[str, Any]] = []
        if context.role(role) is not None:
            tasks = context.suite.pool(pool)
            named = _models(context, role, pool)
            jobs = {task: (context, role, pool, task, named) for task in tasks}
            scores = dict(fan_out(f"evaluate {key}", evaluate_task, jobs, context.suite.workers))
            words = _words(context, role, pool)
            rows = [{**line, "task": task, **scores[task][name]} for name, line in words.items() for task in tasks]
        write_rows(context.layout.scores(key), rows, SCORES)


def _models(context: Context, role: str, pool: int) -> dict[str, Path]:
    """Every model of the role and pool that is the same for all tasks, by name."""
    layout, experiments = context.layout, context.experiments
    models = {"base": layout.base(role, pool)}
    models |= {key: layout.merged(key) for key in experiments.merged_in(role, pool)}
    for key, run in experiments.calibrated_in(role, pool).items():
        models |= {f"{key}/{seed}": layout.calibrated(key, seed) for seed in run.seeds}
    return models


def _words(context: Context, role: str, pool: int) -> dict[str, dict[str, Any]]:
    """How each model is called in the results."""
    common = {"suite": context.suite.name, "role": role, "pool": pool, "metric": "accuracy"}
    plain = {"upstream": "", "setting": "", "seed": ""}
    rows = {"base": common | plain | {"method": "base"}, "expert": common | plain | {"method": "expert"}}
    for key, merged in context.experiments.merged_in(role, pool).items():
        rows[key] = common | plain | {"upstream": merged.method, "method": "merged"}
    for key, run in context.experiments.calibrated_in(role, pool).items():
        for seed in run.seeds:
            named = {"upstream": run.upstream, "method": "featcal", "setting": run.setting, "seed": seed}
            rows[f"{key}/{seed}"] = common | named
    return rows


def evaluate_task(context: Context, role: str, pool: int, task: str, models: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Percent correct and number of images of every model, and of the task's own expert, on one task."""
    from safetensors.torch import load_file

    from featcal.evaluation.accuracy import evaluate_pool
    from featcal.models.device import torch_device
    from featcal.models.load import load_vision
    from featcal.suites.load_task import load_task

    layout = context.layout
    tensors = load_file(layout.heads(role, pool))
    images = load_task(layout.data, task, "test", layout.base(role, pool))
    device = torch_device(context.suite.device)
    loaded = {name: load_vision(folder).to(device) for name, folder in models.items()}
    loaded["expert"] = load_vision(layout.expert(role, pool, task)).to(device)
    heads = {task: tensors[f"head/{task}"]}
    counted = evaluate_pool(loaded, {task: images}, heads, tensors["visual_projection"], BATCH)
    return {
        name: {"value": 100 * counted[name][task][0] / counted[name][task][1], "count": counted[name][task][1]} for name in loaded
    }
