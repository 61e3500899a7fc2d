"""What must hold before the first block: the same tensors everywhere, only numbers in them, a batch list for every expert."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from featcal.errors import BadBatches, TaskMismatch
from featcal.models.residency import Held, require_alike


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
    require_alike(models)
    for name, model in models.items():
        model.check_finite(name)
