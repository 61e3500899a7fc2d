"""The public function `merge`: modules or folders in, a module or a folder out. Which method does
what stands in methods.py.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn
from transformers import AutoConfig, CLIPModel, CLIPVisionModel

from featcal.merging.adapters import expert_sources, named_experts
from featcal.merging.arithmetic import moved
from featcal.merging.card import merge_card
from featcal.merging.embeddings import kept_embeddings
from featcal.merging.head import read_head
from featcal.merging.job import Batches, Job, Named, silent
from featcal.merging.methods import Method, method_named
from featcal.merging.settings import MergeSettings, settings_of
from featcal.merging.sources import Source, require_alike, source
from featcal.merging.stream import Target, fill, merged_tensors, size_of, write_merged
from featcal.merging.towers import aligned
from featcal.models.code import is_adapter
from featcal.models.device import torch_device
from featcal.models.load import VISION, load_model, load_vision, model_class
from featcal.settings import require

Model = nn.Module | str | Path


@dataclass(frozen=True)
class Merged:
    """A merged model and what was found out while it was made: loss curves, coefficients, cuts; the
    same as merge.json.

    model: the module, None when a folder was asked for.  folder: the folder, None otherwise.
    """

    model: nn.Module | None
    folder: Path | None
    record: dict[str, Any]

    @property
    def made(self) -> nn.Module | Path:
        """Whichever was asked for."""
        result = self.model or self.folder
        assert result is not None
        return result


def merge(
    method: str,
    base: Model,
    experts: Mapping[str, Model] | Sequence[Model],
    *,
    out: str | Path | None = None,
    batches: Batches | None = None,
    head: str | Path | Mapping[str, torch.Tensor] | None = None,
    embeddings: str = "merge",
    device: str | torch.device = "cpu",
    progress: Callable[[str], None] = silent,
    at_once: int = 1,
    **settings: Unpack[MergeSettings],
) -> nn.Module | Path:
    """One model from a base and its experts.

    method:   a name of featcal.merging.methods.METHODS, such as average, task_arithmetic, ties,
              tsv_merge, wudi_closed_form or
              regmean; lot is from its published formula, as its code could not be consulted.
    base, experts: modules or checkpoint folders, experts by task name or in a list; folders are
    read tensor by tensor. A whole
              CLIPModel as base of CLIPVisionModel experts is taken by its vision tower. A LoRA
              folder (adapter_config.json, adapter_model.safetensors) is an expert too: base plus
              adapter.
    out:      a folder to write instead of returning a module, with a model card, and merge.json
              where the method keeps a record.
    batches:  for methods that need data: per task an iterable of keyword dictionaries for the
              model's forward.
    head:     for adamerging and fisher: a heads.safetensors, or its tensors: visual_projection,
              logit_scale, head/<task>.
    embeddings: "merge", or "base": tables of words are the base's, so that experts may have other
    vocabularies.
    device:   where it is computed.   progress: a function that is given one line per finished
              piece.
    at_once:  for adamerging, how many tasks are answered at the same time, by a thread and a model
              each: the same bits, sooner where torch computes with one thread.
    settings: the method's own, such as scale=0.3 (featcal/merging/method_settings.py); those left
    out are the paper's.
    Returns:  the merged module, or the path `out`. `merge_recorded` returns the record as well.
    Raises:   UnknownKey, BadSetting; MissingTensor, TensorsDiffer when the models do not fit;
              NotFinite; Diverged; DiskFull.
    """
    more: dict[str, Any] = {"batches": batches, "head": head, "embeddings": embeddings, **settings}
    return merge_recorded(
        method, base, experts, out=out, device=device, progress=progress, at_once=at_once, **more
    ).made


def merge_recorded(
    method: str,
    base: Model,
    experts: Mapping[str, Model] | Sequence[Model],
    *,
    out: str | Path | None = None,
    **given: Any,
) -> Merged:
    """As `merge`, with the record of the run."""
    work = opened_merge(method, base, experts, **given)
    return work.result(work.job, work.rule.tensors(work.job), out)


@dataclass(frozen=True)
class Merge:
    """One merge, opened and checked: rule and job, and what its result is like."""

    rule: Method
    job: Job
    kept: Sequence[str]  # tensors that stay the base's
    origin: Source
    base: Any
    part: str | None
    named: Mapping[str, Any]

    def vectors(self) -> "Vectors":
        """Task vectors τ of a merge θ₀ + s τ whose scale s is still open, so that several are tried
        for the price of one.

        Raises: as `merge`; BadSetting for a method whose result is not θ₀ + s τ.
        """
        require(
            self.rule.scaled,
            "merge.method",
            self.rule.name,
            "must be one that adds its task vectors times a scale to the base",
        )
        require_alike(self.job.base, self.job.experts)
        return Vectors(self, dict(self.rule.found(self.job)))

    def result(self, job: Job, found: Iterator[Named], out: str | Path | None) -> Merged:
        """A module, or the folder `out`, of what is found, which may be of other settings than were
        opened.
        """
        tensors = self._recorded(job, found)
        if out is None:
            return Merged(fill(module_like(self.base, self.part), tensors), None, job.record)
        target = merge_target(self.base, self.part, size_of(self.origin))
        card = merge_card(self.rule, job.settings, self.base, self.named, target.architecture)
        return Merged(None, write_merged(tensors, out, target, job.record, card), job.record)

    def _recorded(self, job: Job, found: Iterator[Named]) -> Iterator[Named]:
        """The merged tensors, then those that stay the base's; a record that has entries is told
        what it is of.
        """
        yield from merged_tensors(job, found)
        yield from ((name, self.origin.finite_tensor(name)) for name in self.kept)
        if job.record:
            about = {"method": self.rule.name, "source": self.rule.source} | (
                {"note": self.rule.note} if self.rule.note else {}
            )
            kept = dict(job.record)
            job.record.clear()
            job.record.update(
                about, settings=job.settings.model_dump(), experts=list(job.experts), **kept
            )


@dataclass(frozen=True)
class Vectors:
    """Task vectors τ of a merged model, by tensor in float64."""

    work: Merge
    found: Mapping[str, torch.Tensor]

    def at(self, scale: float, out: str | Path | None = None) -> nn.Module | Path:
        """The model θ₀ + scale · τ, bit for bit what `merge` makes with this scale; or the folder
        `out`.
        """
        settings = self.work.job.settings.but(scale=scale)
        job = replace(self.work.job, settings=settings, record=dict(self.work.job.record))
        return self.work.result(job, moved(job, self.found.items(), scale), out).made


def opened_merge(
    method: str,
    base: Model,
    experts: Mapping[str, Model] | Sequence[Model],
    *,
    batches: Batches | None = None,
    head: str | Path | Mapping[str, torch.Tensor] | None = None,
    embeddings: str = "merge",
    device: str | torch.device = "cpu",
    progress: Callable[[str], None] = silent,
    at_once: int = 1,
    **settings: Unpack[MergeSettings],
) -> Merge:
    """The merge that `merge` is asked for, before anything is computed. Raises: what it says."""
    rule = method_named(method)
    chosen = settings_of(method, settings, "merge")
    rule.check_needs(batches, head)
    require(
        batches is None or isinstance(batches, Mapping),
        "merge.batches",
        type(batches).__name__,
        "must be a dictionary by task",
    )
    require(
        embeddings in ("merge", "base"), "merge.embeddings", embeddings, "must be merge or base"
    )
    named = named_experts(experts, "merge")
    base, part = matching_part(base, named)
    origin = source(base, "base", part)
    ends = aligned(origin, expert_sources(named, origin), base, named)
    for task, text in ends.told.items():
        progress(f"{task}: {text}")
    kept, shared, theirs = kept_embeddings(origin, ends.experts, embeddings == "base", ends.apart)
    require(at_once > 0, "merge.at_once", at_once, "must be at least 1")
    heads = read_head(head, theirs) if head is not None else {}
    structure = partial(module_like, base, part)
    job = Job(
        shared,
        theirs,
        chosen,
        structure,
        batches or {},
        heads,
        torch_device(device),
        progress,
        at_once,
    )
    return Merge(rule, job, kept, origin, base, part, named)


def merge_target(base: Any, part: str | None, size: int) -> Target:
    """What a folder of a merge like the base holds."""
    architecture = CLIPVisionModel.__name__ if part else _class_of(base).__name__
    if isinstance(base, nn.Module):
        return Target(base.config, architecture, None, size)  # type: ignore[arg-type]
    return Target(AutoConfig.from_pretrained(base, local_files_only=True), architecture, base, size)


def _class_of(model: Model) -> type:
    return type(model) if isinstance(model, nn.Module) else model_class(model)


def matching_part(base: Model, experts: Mapping[str, Model]) -> tuple[Any, str | None]:
    """The base as a module or folder, and which part of the folder; a CLIPModel yields its tower to
    CLIPVisionModel experts.
    """
    whole = [expert for expert in experts.values() if not is_adapter(expert)]
    if not whole or _class_of(whole[0]) is not CLIPVisionModel or _class_of(base) is not CLIPModel:
        return base, None
    return (base.get_submodule(VISION), None) if isinstance(base, nn.Module) else (base, VISION)


def module_like(base: Model, part: str | None) -> nn.Module:
    """A module like the base that is nobody else's."""
    if isinstance(base, nn.Module):
        return copy.deepcopy(base)
    module: nn.Module = load_vision(base) if part else load_model(base)
    return module
