"""Adapters for a pool of tasks: models and batches in, features from both, training, adapters
out.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from featcal.blocks.batches import check_tasks
from featcal.errors import BadSetting
from featcal.models.load import load_as_calibrated
from featcal.models.mode import evaluation_mode
from featcal.rivals.adapters import Adapters
from featcal.rivals.features import Batch, Head, Pair, output_embeddings, pairs_of_several
from featcal.rivals.settings import AdapterMethod, MeanShift
from featcal.rivals.shifts import shift
from featcal.rivals.steps import encoded_steps, kept_steps
from featcal.rivals.training import Audit, train
from featcal.settings import require

Model = nn.Module | str | Path


def adapters_for(
    settings: AdapterMethod,
    merged: Model,
    experts: Mapping[str, Model],
    batches: Mapping[str, Iterable[Batch]],
    head: Head,
    seed: int,
    device: str | torch.device | None,
    progress: Callable[[str], None] | None,
    audit: Audit | None = None,
) -> Adapters:
    """One adapter per task behind the merged model, as the settings say; `audit` as in `train`."""
    module = checked(settings, merged, experts, batches, seed, device)
    if settings.features == "unit" and output_embeddings(module) is not None:
        raise BadSetting(
            f"{settings.name}.features",
            "unit",
            "must be raw for a language model, whose head reads the length too",
        )
    if not isinstance(settings, MeanShift) and settings.encode == "each_step":
        modules = {task: as_module(experts[task], device) for task in sorted(experts)}
        with evaluation_mode([module, *modules.values()]):
            steps = encoded_steps(module, modules, batches, head, settings, seed)
            return train(settings, islice(steps, settings.steps), seed, progress, audit)
    return adapters_from(
        settings, pool_features(module, experts, batches, head, device), seed, progress, audit
    )


def checked(
    settings: AdapterMethod,
    merged: Model,
    experts: Mapping[str, Model],
    batches: Mapping[str, Iterable[Batch]],
    seed: int,
    device: str | torch.device | None,
) -> nn.Module:
    """The merged model as a module, where experts and batches are of the same tasks and the seed is
    one.
    """
    check_tasks(experts, batches)
    require(seed >= 0, f"{settings.name}.seed", seed, "must be at least 0")
    return as_module(merged, device)


def adapters_from(
    settings: AdapterMethod,
    pairs: Mapping[str, Pair],
    seed: int,
    progress: Callable[[str], None] | None = None,
    audit: Audit | None = None,
) -> Adapters:
    """One adapter per task from features that have been computed; they may serve several settings
    of every method.

    Raises: BadSetting for settings that ask for features of every batch anew.
    """
    if isinstance(settings, MeanShift):
        return Adapters(
            settings,
            seed,
            {task: {"shift": shift(settings, task, pair)} for task, pair in pairs.items()},
        )
    if settings.encode != "once":
        raise BadSetting(
            f"{settings.name}.encode", settings.encode, "must be once where features are given"
        )
    return train(
        settings, islice(kept_steps(pairs, settings, seed), settings.steps), seed, progress, audit
    )


def pool_features(
    merged: Model,
    experts: Mapping[str, Model | Tensor],
    batches: Mapping[str, Iterable[Batch]],
    head: Head = None,
    device: str | torch.device | None = None,
) -> dict[str, Pair]:
    """Features of every task by the merged model and by its expert; of experts given as folders one
    at a time is in memory.

    experts: models, or their features of the same batches, (rows, d), where they are known.
    """
    module, found = as_module(merged, device), {}
    for task in sorted(experts):
        expert = experts[task]
        theirs = expert if isinstance(expert, Tensor) else as_module(expert, device)
        found[task] = pairs_of_several(task, {"": module}, theirs, batches[task], head)[""]
    return found


def as_module(model: Model, device: str | torch.device | None) -> nn.Module:
    """A module as it is; a checkpoint folder loaded onto the device, of a whole CLIP its vision
    tower.
    """
    return model if isinstance(model, nn.Module) else load_as_calibrated(model).to(device or "cpu")
