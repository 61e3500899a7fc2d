"""What must hold before the first block: the same tensors everywhere, only numbers in them, a batch list for every expert."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn

from featcal.errors import BadBatches, MissingTensor, TaskMismatch, TensorsDiffer
from featcal.models.residency import Held


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


def check_models(models: Mapping[str, Held]) -> None:
    """Raise unless all models (by the name errors use, the reference first) share names and shapes and hold only numbers."""
    names = list(models)
    reference = shapes(models[names[0]].module)
    for name in names[1:]:
        check_same_tensors(names[0], reference, name, shapes(models[name].module))
    for name in names:
        models[name].check_finite(name)


def check_same_tensors(here: str, expected: Mapping[str, list[int]], there: str, found: Mapping[str, list[int]]) -> None:
    """Raise MissingTensor or TensorsDiffer, naming both models, the tensor and both shapes."""
    for name in expected:
        if name not in found:
            raise MissingTensor(there, name, get_close_matches(name, found, n=3))
        if expected[name] != found[name]:
            raise TensorsDiffer(name, here, expected[name], there, found[name])
    for name in found:
        if name not in expected:
            raise MissingTensor(here, name, get_close_matches(name, expected, n=3))


def shapes(model: nn.Module) -> dict[str, list[int]]:
    """Shapes of parameters by name, tied ones under every name."""
    return {name: list(value.shape) for name, value in model.named_parameters(remove_duplicate=False)}
