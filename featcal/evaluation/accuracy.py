"""Top-1 accuracy of many models in one pass: every picture is prepared once, whatever the number of models."""

from collections.abc import Mapping

import torch
from torch import Tensor

from featcal.evaluation.features import Pictures, Vision, features_of, image_features, require_finite

__all__ = ["evaluate_pool", "features_of", "image_features"]


def evaluate_pool(
    models: Mapping[str, Vision | Mapping[str, Vision]],
    image_sets: Mapping[str, Pictures],
    heads: Mapping[str, Tensor],
    projection: Tensor,
    batch: int = 250,
) -> dict[str, dict[str, tuple[int, int]]]:
    """How many pictures each model gets right.

    models: a model for all tasks, or {task: model} for those it exists for (experts).  heads: (K, p) per task.
    projection: (p, h).
    Returns: {model: {task: (correct, count)}}; the answer is the largest of head · feature (the logit scale changes none).
    Raises: NotFinite naming model and task.
    """
    counted: dict[str, dict[str, tuple[int, int]]] = {name: {} for name in models}
    for task, images in image_sets.items():
        here = _models_of(models, task)
        correct = dict.fromkeys(here, 0)
        labels, seen = torch.as_tensor(images.labels), 0
        for inputs in images.batches(None, batch):
            pixels = inputs["pixel_values"]
            truth = labels[seen : seen + len(pixels)]
            seen += len(pixels)
            for name, model in here.items():
                features = image_features(model, projection, pixels)
                require_finite(features, f"model {name}, task {task}")
                answers = (features @ heads[task].to(features).T).argmax(-1).cpu()  # (n,)
                correct[name] += int((answers == truth).sum())
        for name in here:
            counted[name][task] = (correct[name], seen)
    return counted


def _models_of(models: Mapping[str, Vision | Mapping[str, Vision]], task: str) -> dict[str, Vision]:
    found: dict[str, Vision] = {}
    for name, model in models.items():
        if not isinstance(model, Mapping):
            found[name] = model
        elif task in model:
            found[name] = model[task]
    return found
