"""Top-1 answers of many models in one pass: every picture is prepared once, whatever the number of models."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from featcal.evaluation.features import (
    Pictures,
    Vision,
    features_of,
    image_features,
    projected_features,
    require_finite,
    unit_length,
)

__all__ = ["evaluate_pool", "features_of", "image_features", "percent"]

# the model whose projected features (n, p) are changed, and how, given the task: ("merged", adapters.apply)
Adapted = tuple[str, Callable[[str, Tensor], Tensor]]


def evaluate_pool(
    models: Mapping[str, Vision | Mapping[str, Vision]],
    image_sets: Mapping[str, Pictures],
    heads: Mapping[str, Tensor],
    projection: Tensor,
    batch: int = 250,
    adapted: Mapping[str, Adapted] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Which pictures each model gets right.

    models: a model for all tasks, or {task: model} for those it exists for (experts).  heads: (K, p) per task.
    projection: (p, h).  adapted: by a name of its own, what changes another model's features; that model runs once for all.
    Returns: {model: {task: (n,) bool}}, in the order of the pictures; the answer is the largest of head · feature (the logit
    scale changes none).
    Raises: NotFinite naming model and task.
    """
    adapted = adapted or {}
    judged: dict[str, dict[str, Tensor]] = {name: {} for name in (*models, *adapted)}
    for task, images in image_sets.items():
        here = _models_of(models, task)
        named = (*here, *(name for name, (behind, _) in adapted.items() if behind in here))
        correct: dict[str, list[Tensor]] = {name: [torch.zeros(0, dtype=torch.bool)] for name in named}
        labels, seen = torch.as_tensor(images.labels), 0
        for inputs in images.batches(None, batch):
            pixels = inputs["pixel_values"]
            truth = labels[seen : seen + len(pixels)]
            seen += len(pixels)
            for model_name, model in here.items():
                projected = projected_features(model, projection, pixels)
                changes = {name: change for name, (behind, change) in adapted.items() if behind == model_name}
                for name, change in {model_name: None, **changes}.items():
                    features = unit_length(projected if change is None else change(task, projected))
                    require_finite(features, f"model {name}, task {task}")
                    answers = (features @ heads[task].to(features).T).argmax(-1).cpu()  # (n,)
                    correct[name].append(answers == truth)
        for name, parts in correct.items():
            judged[name][task] = torch.cat(parts)
    return judged


def percent(correct: Tensor) -> float:
    """Accuracy in percent, from which pictures are right, (n,)."""
    return 100 * int(correct.sum()) / len(correct)


def _models_of(models: Mapping[str, Vision | Mapping[str, Vision]], task: str) -> dict[str, Vision]:
    found: dict[str, Vision] = {}
    for name, model in models.items():
        if not isinstance(model, Mapping):
            found[name] = model
        elif task in model:
            found[name] = model[task]
    return found
