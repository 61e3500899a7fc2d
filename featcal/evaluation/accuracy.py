"""Top-1 answers of many models in one pass: every picture or sentence is prepared once, whatever
the number of models.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from featcal.evaluation.features import (
    Encoder,
    Samples,
    projected_features,
    require_finite,
    unit_length,
)

# the model whose projected features (n, p) are changed, and how, given the task: ("merged",
# adapters.apply)
Adapted = tuple[str, Callable[[str, Tensor], Tensor]]


def evaluate_pool(
    models: Mapping[str, Encoder | Mapping[str, Encoder]],
    sets: Mapping[str, Samples],
    heads: Mapping[str, Tensor],
    projection: Tensor | None,
    batch: int = 250,
    adapted: Mapping[str, Adapted] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Which pictures or sentences each model gets right.

    models: a model for all tasks, or {task: model} for those it exists for (experts).  heads: (K,
    p) per task.
    projection: (p, h), or None.  adapted: by a name of its own, what changes another model's
    features; it runs once for all.
    Returns: {model: {task: (n,) bool}}, in the order of the set; the answer is the largest of head
    · feature (the logit scale changes none).
    Raises: NotFinite naming model and task.
    """
    adapted = adapted or {}
    judged: dict[str, dict[str, Tensor]] = {name: {} for name in (*models, *adapted)}
    for task, samples in sets.items():
        here = _models_of(models, task)
        named = (*here, *(name for name, (behind, _) in adapted.items() if behind in here))
        correct: dict[str, list[Tensor]] = {
            name: [torch.zeros(0, dtype=torch.bool)] for name in named
        }
        labels, seen = torch.as_tensor(samples.labels), 0
        for inputs in samples.batches(None, batch):
            truth = labels[seen : seen + len(next(iter(inputs.values())))]
            seen += len(truth)
            for model_name, model in here.items():
                projected = projected_features(model, projection, inputs)
                changes = {
                    name: change
                    for name, (behind, change) in adapted.items()
                    if behind == model_name
                }
                for name, change in {model_name: None, **changes}.items():
                    features = unit_length(projected if change is None else change(task, projected))
                    require_finite(features, f"model {name}, task {task}")
                    answers = (features @ heads[task].to(features).T).argmax(-1).cpu()  # (n,)
                    correct[name].append(answers == truth)
        for name, parts in correct.items():
            judged[name][task] = torch.cat(parts)
    return judged


def percent(correct: Tensor) -> float:
    """Accuracy in percent, from which samples are right, (n,)."""
    return 100 * int(correct.sum()) / len(correct)


def _models_of(
    models: Mapping[str, Encoder | Mapping[str, Encoder]], task: str
) -> dict[str, Encoder]:
    found: dict[str, Encoder] = {}
    for name, model in models.items():
        if not isinstance(model, Mapping):
            found[name] = model
        elif task in model:
            found[name] = model[task]
    return found
