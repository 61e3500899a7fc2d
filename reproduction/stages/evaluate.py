"""Stage `evaluate`: accuracy of every encoder of a role and pool on the test images or texts of each task."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from featcal.storage.results import packed
from reproduction.experiments.runs import Pool
from reproduction.stages.context import Context
from reproduction.stages.score_files import write_score_files
from reproduction.stages.scored import Scored
from reproduction.stages.scoring import Counts, score_models

# Samples at a time, on which accuracy does not depend; on a CPU so few that what a block puts out stays in its cache: a sentence
# encoder then takes two thirds of the time that it takes with 250.
BATCH, CACHED = 250, 64
Most = Callable[[str, int], Any]


def run(key: str) -> None:
    """Write outputs/<suite>/scores/<key>/; no rows where nothing plays the role."""
    write_score_files(key, score)


def score(context: Context, label: str, role: str, pool: Pool, models: Sequence[Scored]) -> dict[str, list[dict[str, Any]]]:
    """Result rows of every model by its name: one per task, with the words that the results call the model by."""
    return score_models(evaluate_model, context, label, role, pool, models, context.suite.tasks_of(role, pool))


def evaluate_model(
    context: Context, role: str, pool: Pool, model: Scored, corrected: Sequence[Scored], most: Most | None = None
) -> dict[str, Counts]:
    """What one model (or each task's own expert) and adapters behind it get right on every task.

    Percent correct, number of samples, and of each whether it is right.   most: as of `samples_of`.
    """
    from featcal.models.device import torch_device
    from featcal.models.load import load_as_calibrated
    from featcal.rivals.adapters import Adapters

    device, changes = torch_device(context.suite.device), {}
    for other in corrected:
        assert other.folder is not None  # only each task's own expert has none
        changes[other.name] = Adapters.load(other.folder).apply
    shared: Any = model.folder and load_as_calibrated(model.folder).to(device)  # type: ignore[arg-type]

    def models_of(task: str) -> dict[str, Any]:
        own = shared or load_as_calibrated(context.layout.expert(role, pool, task)).to(device)  # type: ignore[arg-type]
        return {model.name: own}

    return answers(context, role, pool, models_of, partial(samples_of, context, role, pool, most=most), changes)


def samples_of(context: Context, role: str, pool: Pool, task: str, split: str = "test", most: Most | None = None) -> Any:
    """Samples of one task where the suite computes.   most: of a task and its number of samples the indices to answer."""
    from featcal.data.images import ImageSet
    from featcal.models.device import torch_device
    from reproduction.suites.load_task import load_task

    samples = load_task(context.layout.data_of(role), task, split, context.layout.base(role, pool))
    samples = samples.take(most(task, len(samples.labels))) if most else samples
    return replace(samples, device=torch_device(context.suite.device)) if isinstance(samples, ImageSet) else samples


def drawn(most: int, seed: int, task: str, count: int) -> list[int]:
    """At most so many samples of a task, in their order."""
    from featcal.data.sampling import draw_indices

    return sorted(draw_indices(task, count, min(most, count), seed).tolist())


def answers(
    context: Context,
    role: str,
    pool: Pool,
    models_of: Callable[[str], Mapping[str, Any]],
    read: Callable[[str], Any],
    changes: Mapping[str, Callable[[str, Any], Any]] | None = None,
    tasks: Sequence[str] = (),
) -> dict[str, Counts]:
    """What models get right, by their names, and by others what is right once the features of the first are changed.

    models_of, read: of a task its models by name, and its samples.   tasks: all of the pool where none is named.
    """
    from safetensors.torch import load_file

    from featcal.evaluation.accuracy import evaluate_pool, percent
    from featcal.models.device import torch_device

    batch = CACHED if torch_device(context.suite.device).type == "cpu" else BATCH
    tensors = load_file(context.layout.heads(role, pool))
    found: dict[str, Counts] = {}
    for task in tasks or context.suite.tasks_of(role, pool):
        models, heads = models_of(task), {task: tensors[f"head/{task}"]}
        adapted = {name: (next(iter(models)), change) for name, change in (changes or {}).items()}
        judged = evaluate_pool(models, {task: read(task)}, heads, tensors.get("visual_projection"), batch, adapted)
        for name, right in judged.items():
            own = {"value": percent(right[task]), "count": len(right[task]), "correct": packed(right[task])}
            found.setdefault(name, {})[task] = own
    return found


def averages(
    context: Context, role: str, pool: Pool, models: Mapping[float, Any], read: Callable[[str], Any]
) -> dict[float, float]:
    """Average accuracy over the tasks of every model, in percent, on the samples that `read` gives of a task."""
    judged = answers(context, role, pool, lambda _: {str(name): model for name, model in models.items()}, read)
    return {name: sum(one["value"] for one in judged[str(name)].values()) / len(judged[str(name)]) for name in models}
