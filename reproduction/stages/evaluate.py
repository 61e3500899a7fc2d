"""Stage `evaluate`: accuracy of every encoder of a role and pool on the test images or texts of each task."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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


def evaluate_model(
    context: Context,
    role: str,
    pool: Pool,
    model: Scored,
    corrected: Sequence[Scored],
    most: Callable[[str, int], Any] | None = None,
) -> dict[str, Counts]:
    """What one model (or each task's own expert) and adapters behind it get right on every task.

    Percent correct, number of samples, and of each whether it is right.   most: as of `answers`.
    """
    from featcal.models.device import torch_device
    from featcal.models.load import load_as_calibrated
    from featcal.rivals.adapters import Adapters

    device, changes = torch_device(context.suite.device), {}
    for other in corrected:
        assert other.folder is not None  # only each task's own expert has none
        changes[other.name] = Adapters.load(other.folder).apply
    shared: Any = model.folder and load_as_calibrated(model.folder).to(device)  # type: ignore[arg-type]

    def encoder_of(task: str) -> Any:
        return shared or load_as_calibrated(context.layout.expert(role, pool, task)).to(device)  # type: ignore[arg-type]

    return answers(context, role, pool, model.name, encoder_of, changes, most=most)


def answers(
    context: Context,
    role: str,
    pool: Pool,
    name: str,
    encoder_of: Callable[[str], Any],
    changes: Mapping[str, Callable[[str, Any], Any]],
    around: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    most: Callable[[str, int], Any] | None = None,
    split: str = "test",
) -> dict[str, Counts]:
    """What the encoder of every task gets right, by `name`, and by their names what is right once its features are changed.

    around: entered with the task while it is answered.   most: of a task and its number of samples the indices to answer.
    split: of the samples, test or validation.
    """
    from safetensors.torch import load_file

    from featcal.data.images import ImageSet
    from featcal.evaluation.accuracy import evaluate_pool, percent
    from featcal.models.device import torch_device
    from reproduction.suites.load_task import load_task

    layout, device = context.layout, torch_device(context.suite.device)
    tensors, adapted = load_file(layout.heads(role, pool)), {one: (name, change) for one, change in changes.items()}
    found: dict[str, Counts] = {one: {} for one in (name, *changes)}
    for task in context.suite.tasks_of(role, pool):
        samples = load_task(layout.data_of(role), task, split, layout.base(role, pool))
        samples = samples.take(most(task, len(samples.labels))) if most else samples
        samples = replace(samples, device=device) if isinstance(samples, ImageSet) else samples
        heads = {task: tensors[f"head/{task}"]}
        with around(task):
            models = {name: encoder_of(task)}
            judged = evaluate_pool(models, {task: samples}, heads, tensors.get("visual_projection"), BATCH, adapted)
        for one, right in judged.items():
            found[one][task] = {"value": percent(right[task]), "count": len(right[task]), "correct": packed(right[task])}
    return found
