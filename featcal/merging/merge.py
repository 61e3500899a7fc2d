"""The public function `merge`: modules or folders in, a module or a folder out."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, CLIPModel, CLIPVisionModel, PretrainedConfig

from featcal import __version__
from featcal.card import name_of, render_card, write_card
from featcal.errors import TensorsDiffer
from featcal.files import write_json
from featcal.merging.alignment import aligned, class_of
from featcal.merging.answers import read_head
from featcal.merging.registry import Job, Method, Named, method_named, settings_of, silent
from featcal.merging.sources import (
    Source,
    expert_sources,
    kept_embeddings,
    named_experts,
    require_alike,
    source,
)
from featcal.merging.tensors import moved
from featcal.models.batch import Model, TaskBatches
from featcal.models.load import (
    VISION,
    is_adapter,
    load_model,
    load_vision,
    model_class,
    torch_device,
)
from featcal.models.save import ShardWriter, copy_other_files, write_config
from featcal.settings import require


@dataclass(frozen=True)
class Merged:
    """A merged model, as a module or a folder, and the record of the run, as in merge.json."""

    model: nn.Module | None
    folder: Path | None
    record: dict[str, Any]

    @property
    def made(self) -> nn.Module | Path:
        """Return the one that was asked for."""
        result = self.model or self.folder
        assert result is not None
        return result


def merge(
    method: str,
    base: Model,
    experts: Mapping[str, Model] | Sequence[Model],
    *,
    out: str | Path | None = None,
    batches: TaskBatches | None = None,
    head: str | Path | Mapping[str, torch.Tensor] | None = None,
    embeddings: str = "merge",
    device: str | torch.device = "cpu",
    progress: Callable[[str], None] = silent,
    n_jobs: int = 1,
    **settings: Any,
) -> nn.Module | Path:
    """Merge experts into one model.

    Args:
        method: such as average, task_arithmetic, ties, tsv_merge, wudi_closed_form or regmean;
            `featcal merge --help` lists all methods with their settings.
        base, experts: modules or checkpoint folders, experts by task name or in a list. Folders
            are read tensor by tensor. Of a whole CLIPModel as base of CLIPVisionModel experts only
            the vision tower is used. A LoRA folder is an expert too: base plus adapter.
        out: a folder to write instead of returning a module, with a model card, and merge.json
            where the method keeps a record.
        batches: for methods that need data: per task an iterable of keyword dictionaries for the
            model's forward.
        head: for adamerging, fisher and gradient_matching: a heads.safetensors, or its tensors:
            visual_projection, logit_scale, head/<task>.
        embeddings: "merge", or "base" to keep the base's token embeddings, for experts with other
            vocabularies.
        device: to compute on.
        progress: called with one line per finished piece.
        n_jobs: for adamerging, how many batches are answered in parallel, by a thread and a model
            each; the result is bit-identical.
        settings: the method's own, such as scale=0.3. Default: the paper's.

    Returns: the merged module, or the path `out`. `merge_recorded` returns the record as well.
    Raises: UnknownKey, BadSetting; MissingTensor, TensorsDiffer when the models do not fit;
        NotFinite; Diverged; DiskFull.
    """
    more: dict[str, Any] = {"batches": batches, "head": head, "embeddings": embeddings, **settings}
    return merge_recorded(
        method, base, experts, out=out, device=device, progress=progress, n_jobs=n_jobs, **more
    ).made


def merge_recorded(
    method: str,
    base: Model,
    experts: Mapping[str, Model] | Sequence[Model],
    *,
    out: str | Path | None = None,
    **given: Any,
) -> Merged:
    """Merge as `merge` does, and return the record of the run as well."""
    work = opened_merge(method, base, experts, **given)
    found = work.rule.found(work.job, work.settings)
    if work.rule.scaled:
        found = moved(work.job, found, work.settings["scale"])
    return work.result(work.job, work.settings, found, out)


@dataclass(frozen=True)
class Merge:
    """One merge, opened and checked, before anything is computed."""

    rule: Method
    settings: dict[str, Any]
    job: Job
    kept: Sequence[str]  # tensors that stay the base's
    origin: Source
    base: Any
    part: str | None
    named: Mapping[str, Any]

    def vectors(self) -> "Vectors":
        """Compute the task vectors τ of a merge θ₀ + s τ, so that several scales s cost one merge.

        Raises: as `merge`; BadSetting for a method whose result is not θ₀ + s τ.
        """
        expected = "must be one that adds its task vectors times a scale to the base"
        require(self.rule.scaled, "merge.method", self.rule.name, expected)
        require_alike(self.job.base, self.job.experts)
        return Vectors(self, dict(self.rule.found(self.job, self.settings)))

    def result(
        self,
        job: Job,
        settings: Mapping[str, Any],
        found: Iterator[Named],
        out: str | Path | None,
    ) -> Merged:
        """Make a module, or write the folder `out`, from the tensors found."""
        tensors = self._all_tensors(job, settings, found)
        if out is None:
            return Merged(fill(module_like(self.base, self.part), tensors), None, job.record)
        target = merge_target(self.base, self.part, size_of(self.origin))
        text = merge_card(self.rule, settings, self.base, self.named, target.architecture)
        return Merged(None, write_merged(tensors, out, target, job.record, text), job.record)

    def _all_tensors(
        self, job: Job, settings: Mapping[str, Any], found: Iterator[Named]
    ) -> Iterator[Named]:
        """Yield counters, merged tensors, then those that stay the base's; complete the record."""
        require_alike(job.base, job.experts)
        for name in sorted(set(job.base.names) - set(job.names)):
            yield name, _counter(name, job)
        yield from found
        yield from ((name, self.origin.finite_tensor(name)) for name in self.kept)
        if job.record:
            about = {"method": self.rule.name, "source": self.rule.source}
            about |= {"note": self.rule.note} if self.rule.note else {}
            of_run = {"settings": dict(settings), "experts": list(job.experts), **job.record}
            job.record.clear()
            job.record.update(about, **of_run)


@dataclass(frozen=True)
class Vectors:
    """Task vectors τ of a merge, by tensor in float64."""

    work: Merge
    found: Mapping[str, torch.Tensor]

    def at(self, scale: float, out: str | Path | None = None) -> nn.Module | Path:
        """Return the model θ₀ + scale · τ, bit-identical to `merge` with this scale."""
        job = replace(self.work.job, record=dict(self.work.job.record))
        settings = {**self.work.settings, "scale": scale}
        return self.work.result(job, settings, moved(job, self.found.items(), scale), out).made


def opened_merge(
    method: str,
    base: Model,
    experts: Mapping[str, Model] | Sequence[Model],
    *,
    batches: TaskBatches | None = None,
    head: str | Path | Mapping[str, torch.Tensor] | None = None,
    embeddings: str = "merge",
    device: str | torch.device = "cpu",
    progress: Callable[[str], None] = silent,
    n_jobs: int = 1,
    **settings: Any,
) -> Merge:
    """Open and check the merge that `merge` is asked for. Raises: as `merge`."""
    rule, chosen = method_named(method), settings_of(method, settings)
    rule.check_needs({"batches": batches, "head": head})
    kind = type(batches).__name__
    mapping = batches is None or isinstance(batches, Mapping)
    require(mapping, "merge.batches", kind, "must be a dictionary by task")
    known = embeddings in ("merge", "base")
    require(known, "merge.embeddings", embeddings, "must be merge or base")
    named = named_experts(experts, "merge")
    base, part = matching_part(base, named)
    origin = source(base, "base", part)
    ends = aligned(origin, expert_sources(named, base, origin, part), base, named)
    for task, text in ends.left_out.items():
        progress(f"{task}: {text}")
    kept, shared, theirs = kept_embeddings(origin, ends.experts, embeddings == "base", ends.apart)
    require(n_jobs > 0, "merge.n_jobs", n_jobs, "must be at least 1")
    job = Job(
        shared,
        theirs,
        partial(module_like, base, part),
        batches or {},
        read_head(head, theirs) if head is not None else {},
        torch_device(device),
        progress,
        n_jobs,
    )
    return Merge(rule, chosen, job, kept, origin, base, part, named)


def matching_part(base: Model, experts: Mapping[str, Model]) -> tuple[Any, str | None]:
    """Return the base, and the part of its folder to use: a CLIPModel's vision tower where the
    experts are CLIPVisionModels.
    """
    whole = [expert for expert in experts.values() if not is_adapter(expert)]
    if not whole or _class_of(whole[0]) is not CLIPVisionModel or _class_of(base) is not CLIPModel:
        return base, None
    return (base.get_submodule(VISION), None) if isinstance(base, nn.Module) else (base, VISION)


def module_like(base: Model, part: str | None) -> nn.Module:
    """Return a new module like the base."""
    if isinstance(base, nn.Module):
        return copy.deepcopy(base)
    module: nn.Module = load_vision(base) if part else load_model(base)
    return module


def _class_of(model: Model) -> type:
    return class_of(model) or model_class(model)


def _counter(name: str, job: Job) -> Tensor:
    """Return an integer tensor, which must be equal in all models. Raises: TensorsDiffer."""
    ours = job.base.finite_tensor(name)
    for expert in job.experts.values():
        if not torch.equal(ours, expert.finite_tensor(name)):
            places = job.base.file_of(name), expert.file_of(name)
            raise TensorsDiffer(name, places[0], "one value", places[1], "another")
    return ours


# Results


@dataclass(frozen=True)
class Target:
    """What a merged folder holds besides tensors: configuration, class name, files of `like`."""

    config: PretrainedConfig
    architecture: str
    like: str | Path | None
    bytes: int


def merge_target(base: Any, part: str | None, size: int) -> Target:
    """Return the target of a merge like the base."""
    architecture = CLIPVisionModel.__name__ if part else _class_of(base).__name__
    if isinstance(base, nn.Module):
        return Target(base.config, architecture, None, size)  # type: ignore[arg-type]
    return Target(AutoConfig.from_pretrained(base, local_files_only=True), architecture, base, size)


def size_of(base: Source) -> int:
    """Return the bytes of all tensors."""
    return sum(math.prod(base.shape(name)) * base.dtype(name).itemsize for name in base.names)


def write_merged(
    tensors: Iterator[Named],
    out: str | Path,
    target: Target,
    record: Mapping[str, Any],
    text: str = "",
) -> Path:
    """Write a Hugging Face folder of tensors with its card, complete or not at all; merge.json
    where there is a record. Raises: DiskFull.
    """
    first = next(tensors)  # checks run here, before a folder is made
    with ShardWriter(out, needed=target.bytes) as writer:
        write_config(target.config, target.architecture, writer.folder)
        copy_other_files(target.like, writer.folder)
        writer.write(*first)
        for name, tensor in tensors:
            writer.write(name, tensor)
        if record:  # filled while the tensors came
            write_json(writer.folder / "merge.json", record)
        if text:
            write_card(writer.folder, text)
    return Path(out)


@torch.no_grad()
def fill(module: nn.Module, tensors: Iterator[Named]) -> nn.Module:
    """Copy the tensors into the module and return it."""
    state = module.state_dict()
    for name, tensor in tensors:
        state[name].copy_(tensor)  # tied tensors share memory, so one copy reaches all their names
    return module


def merge_card(
    rule: Method,
    settings: Mapping[str, Any],
    base: object,
    experts: Mapping[str, Any],
    architecture: str,
) -> str:
    """Return the text of the model card."""
    return render_card(
        f"{name_of(base)}: {len(experts)} experts merged",
        f"{len(experts)} fine-tuned models merged into one by `{rule.name}` (featcal {__version__}).",
        {"base": base} | {f"expert {task}": experts[task] for task in sorted(experts)},
        list(settings.items()),
        {"merge_method": rule.name},
        method=f"`{rule.name}`, {rule.source}. {rule.note}".rstrip(),
        class_name=architecture,
    )
