"""The public function `merge`: modules or folders in, a module or a folder out. Which method does what stands in methods.py."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, CLIPModel, CLIPVisionModel

from featcal.errors import BadSetting
from featcal.merging.methods import method_named
from featcal.merging.sources import source
from featcal.merging.stream import Target, merged_tensors, size_of, write_merged
from featcal.models.load import VISION, load_model, load_vision, model_class

Model = nn.Module | str | Path


def merge(
    method: str,
    base: Model,
    experts: Mapping[str, Model] | Sequence[Model],
    *,
    scale: float | None = None,
    out: str | Path | None = None,
    batches: Any = None,
) -> nn.Module | Path:
    """One model from a base and its experts.

    method:   "average" or "task_arithmetic".
    base, experts: modules or checkpoint folders, experts by task name or in a list; folders are read tensor by tensor. A whole
              CLIPModel as base of CLIPVisionModel experts is taken by its vision tower.
    scale:    s of task arithmetic, 0.3 when left out (paper); average takes none.
    out:      a folder to write instead of returning a module.
    batches:  for methods that need data; none of the present ones does.
    Returns:  the merged module, or the path `out`.
    Raises:   UnknownKey, BadSetting; MissingTensor, TensorsDiffer when the models do not fit; NotFinite; DiskFull.
    """
    rule = method_named(method)
    settings = rule.settings(scale, batches)
    named = dict(experts) if isinstance(experts, Mapping) else {f"{i:03d}": expert for i, expert in enumerate(experts)}
    if not named:
        raise BadSetting("merge.experts", named, "must hold at least one expert")
    kind = _class_of(next(iter(named.values())))
    base, part = _matching_part(base, kind)
    origin = source(base, "base", part)
    tensors = merged_tensors(rule, settings, origin, {t: source(expert, f"expert {t!r}") for t, expert in named.items()})
    if out is None:
        return _filled(base, part, tensors)
    return write_merged(tensors, out, _target(base, part, size_of(origin)))


def _target(base: Any, part: str | None, size: int) -> Target:
    architecture = CLIPVisionModel.__name__ if part else _class_of(base).__name__
    if isinstance(base, nn.Module):
        return Target(base.config, architecture, None, size)  # type: ignore[arg-type]
    return Target(AutoConfig.from_pretrained(base, local_files_only=True), architecture, base, size)


def _class_of(model: Model) -> type:
    return type(model) if isinstance(model, nn.Module) else model_class(model)


def _matching_part(base: Model, expert_class: type) -> tuple[Any, str | None]:
    """The base as a module or folder, and which part of the folder; a CLIPModel yields its tower to CLIPVisionModel experts."""
    if expert_class is not CLIPVisionModel or _class_of(base) is not CLIPModel:
        return base, None
    return (base.get_submodule(VISION), None) if isinstance(base, nn.Module) else (base, VISION)


@torch.no_grad()
def _filled(base: Any, part: str | None, tensors: Any) -> nn.Module:
    """A module like the base that holds the merged tensors; the base itself stays as it is."""
    module: nn.Module
    if isinstance(base, nn.Module):
        module = copy.deepcopy(base)
    else:
        module = load_vision(base) if part else load_model(base)
    state = module.state_dict()
    for name, tensor in tensors:
        state[name].copy_(tensor)  # tied tensors share memory, so one copy reaches all their names
    return module
