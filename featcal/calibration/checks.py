"""What must hold before the first block: the same tensors everywhere, only numbers in them, a batch list for every expert."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from featcal.errors import BadBatches, MissingTensor, NotFinite, TaskMismatch, TensorsDiffer


def check_tasks(experts: Mapping[str, Any], batches: Mapping[str, Any]) -> None:
    """Raise TaskMismatch unless experts and batches have the same tasks, at least one."""
    if not experts:
        raise BadBatches("*", "no experts were given; calibration needs at least one expert with its batches")
    for task in sorted(experts):
        if task not in batches:
            raise TaskMismatch(task, "batches", sorted(batches))
    for task in sorted(batches):
        if task not in experts:
            raise TaskMismatch(task, "expert", sorted(experts))
        if batches[task] is None or isinstance(batches[task], Mapping | Tensor | str):
            kind = type(batches[task]).__name__
            raise BadBatches(task, f"is a {kind}; expected a list of mappings such as [{{'pixel_values': tensor}}, ...]")


def check_models(models: Mapping[str, nn.Module]) -> None:
    """Raise unless all models (by the name errors use, the reference first) share names and shapes and hold only numbers."""
    names = list(models)
    for name in names[1:]:
        check_same_tensors(names[0], models[names[0]], name, models[name])
    for name in names:
        for tensor, value in tensors(models[name]).items():
            if value.is_floating_point() and not torch.isfinite(value).all():
                raise NotFinite(name, tensor)


def check_same_tensors(here: str, reference: nn.Module, there: str, model: nn.Module) -> None:
    """Raise MissingTensor or TensorsDiffer, naming both models, the tensor and both shapes."""
    expected, found = tensors(reference), tensors(model)
    for name in expected:
        if name not in found:
            raise MissingTensor(there, name, get_close_matches(name, found, n=3))
        if expected[name].shape != found[name].shape:
            raise TensorsDiffer(name, here, list(expected[name].shape), there, list(found[name].shape))
    for name in found:
        if name not in expected:
            raise MissingTensor(here, name, get_close_matches(name, expected, n=3))


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name, tied ones under every name."""
    return {name: value.detach() for name, value in model.named_parameters(remove_duplicate=False)}
