"""The public function `merge`: modules or folders in, a module or a folder out."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, CLIPModel, CLIPVisionModel

from featcal import __version__, card, errors
from featcal.core.precision import exact_products
from featcal.errors import FeatCalError, MissingPath, MissingTensor, TensorsDiffer, counted
from featcal.files import claimed, read_json, require_apart, write_json
from featcal.merging import sources
from featcal.merging.registry import MergeJob, Method, NamedTensors, method_named, settings_of
from featcal.merging.sources import Source, Tensors, is_vocabulary
from featcal.merging.tensors import add_task_vector
from featcal.models import load
from featcal.models.batch import Model, TaskBatches, check_named, check_tasks
from featcal.models.checkpoint import all_finite, encodes_sentences, is_adapter, read_safetensors
from featcal.models.lora import class_of, copied, untied_config, unwrapped, without_adapters
from featcal.models.sentences import merge_modules
from featcal.models.stored import ModelCheckpoint
from featcal.models.streamed import report_labels, require_same_configs
from featcal.settings import require

PROJECTION, LOGIT_SCALE = "visual_projection", "logit_scale"


def merge(
    method: str,
    base: Model,
    experts: Mapping[str, Model] | Sequence[Model],
    *,
    out: str | Path | None = None,
    batches: TaskBatches | None = None,
    head: str | Path | Mapping[str, Tensor] | None = None,
    embeddings: str = "merge",
    device: str | torch.device = "cpu",
    progress: Callable[[str], None] | None = None,
    n_jobs: int = 1,
    _complete: Callable[[Path], object] | None = None,
    **settings: Any,
) -> nn.Module | Path:
    """Merge experts into one model.

    Args:
        method: such as average, task_arithmetic, ties, tsv_merge, wudi_closed_form or regmean;
            `featcal merge --help` lists all methods with their settings.
        base, experts: modules or checkpoint folders, experts by task name or in a list. Folders
            are read tensor by tensor. A LoRA folder is an expert too: base plus adapter. Of a
            CLIPModel as base of CLIPVisionModel experts only the vision tower is used.
        out: folder to write instead, with a model card and, if the method keeps one, merge.json.
        batches: for methods that need data: by task, mappings of the model's keyword arguments.
        head: for adamerging, fisher and gradient_matching: a heads.safetensors, or its tensors:
            visual_projection (p, h), logit_scale (), head/<task> (classes, p).
        embeddings: "merge", or "base" to keep the base's token embeddings.
        device: to compute on.
        progress: called with one line per finished piece.
        n_jobs: batches that adamerging computes in parallel; the result is bit-identical.
        settings: the method's own, such as scale=0.3. Default: those of its source.

    Returns: the merged module in evaluation mode, or the path `out`.
    Raises: UnknownKey, BadSetting; MissingTensor, TensorsDiffer; NotFinite; Diverged; DiskFull.
    """
    arguments: dict[str, Any] = {"batches": batches, "head": head, "embeddings": embeddings}
    arguments |= {"device": device, "progress": progress, "n_jobs": n_jobs}
    with exact_products(), nullcontext() if out is None else claimed(out):
        opened = open_merge(method, base, experts, **arguments, **settings)
        if out is not None:
            require_apart("merge.out", out, (base, head, *opened.experts.values()))
            load.require_replaceable(Path(out))
        return opened.finish(opened.run(), out, _complete)


@dataclass(frozen=True)
class Form:
    """The base as template of the merged model; `untied` are tables that an expert does not tie."""

    model: Model
    part: str | None
    source: Source
    untied: Mapping[str, str] = field(default_factory=dict)
    merged: Tensors = field(default_factory=dict)  # in the precision of the merged model

    @classmethod
    def of(cls, base: Model, experts: Mapping[str, Model]) -> "Form":
        """Open the base; of CLIPModels the vision tower, if others are CLIPVisionModels."""
        models = [base, *(expert for expert in experts.values() if not is_adapter(expert))]
        part = load.VISION if {*map(class_of, models)} == {*load.CLIP_CLASSES} else None
        if isinstance(base, CLIPModel) and part:
            base = base.get_submodule(part)
        return cls(base, part, sources.source(base, "base", part))

    @property
    def architecture(self) -> str:
        """Return the class name of a merged model."""
        return CLIPVisionModel.__name__ if self.part else class_of(self.model).__name__

    def module(self) -> nn.Module:
        """Return a new module that holds `merged` unrounded; `untied` names are no longer tied."""
        if isinstance(self.model, nn.Module):
            module: Any = copied(self.model).eval()
        else:
            module = load.load_vision(self.model) if self.part else load.load_model(self.model)
        for name in self.untied:
            path, _, attribute = name.rpartition(".")
            table = nn.Parameter(module.get_parameter(name).detach().clone())
            setattr(module.get_submodule(path), attribute, table)
            module.config = untied_config(module.config)
        state = module.state_dict()
        pairs = [(state[name].dtype, t.dtype) for name, t in self.merged.items() if name in state]
        if all(torch.promote_types(dtype, merged) == dtype for dtype, merged in pairs):
            return module
        return module.to(reduce(torch.promote_types, chain.from_iterable(pairs)))

    @torch.no_grad()
    def result(
        self,
        tensors: NamedTensors,
        out: str | Path | None,
        complete: Callable[[Path], None] = lambda folder: None,
    ) -> nn.Module | Path:
        """Return a module with these tensors, or write a folder, which `complete` adds files to."""
        stored = self.source if isinstance(self.source, ModelCheckpoint) else None
        size = sum(tensor.nbytes for tensor in self.source.tensors.values())
        if out is None:
            module = self.module()
            state = module.state_dict()
            for name, tensor in stored.to_module(tensors) if stored else tensors:
                if name in state:  # a head that the class lacks is not
                    state[name].copy_(tensor)  # tied tensors share memory
            return module
        if isinstance(self.model, nn.Module):
            config = getattr(self.model, "config", None)
            expected = "must be left out for a model without a transformers configuration"
            require(config is not None, "merge.out", str(out), expected)
        else:
            like = self.model
            model_type = read_json(Path(like) / "config.json").get("model_type")  # not before 2020
            kind: Any = AutoConfig if model_type else class_of(like).config_class
            config = kind.from_pretrained(like, local_files_only=True)
        if stored:  # a table that the base stores as its head gets its own name
            stored.forms |= {n: n for other, n in self.untied.items() if stored.forms[n] == other}
            tensors = iter(stored.to_files(tensors))
        first = next(tensors)  # checks run here, before a folder is made
        with load.shard_writer(out, needed=size) as writer:
            config = untied_config(config) if self.untied else config
            load.write_config(config, self.architecture, writer.folder, self.model)
            for name, tensor in chain([first], tensors):
                writer.write(name, tensor)
            complete(writer.folder)
        return Path(out)


@dataclass(frozen=True)
class OpenedMerge:
    """One merge, opened and checked before anything is computed."""

    method: Method
    settings: dict[str, Any]
    job: MergeJob
    unmerged: Tensors  # which stay the base's
    form: Form
    experts: Mapping[str, Model]

    def run(self) -> NamedTensors:
        """Yield the merged tensors, or task vectors of a scaled method. Raises: BadPlan."""
        used = {k: v for k, v in self.settings.items() if k != "scale" or not self.method.scaled}
        try:
            yield from self.method.run(self.job, **used)
        except (errors.BadCapture, errors.BadPlan) as error:  # these name a calibration's settings
            way_out = "merge it by a method that needs no data, such as task_arithmetic"
            raise errors.BadPlan(self.form.architecture, error.problem, way_out) from None

    @property
    def record(self) -> dict[str, Any]:
        """Return the content of merge.json, complete after the last tensor; {} if there is none."""
        if not self.job.record:
            return {}
        about = {"method": self.method.name, "source": self.method.source}
        about |= {"note": self.method.note} if self.method.note else {}
        of_run = {"settings": dict(self.settings), "experts": list(self.job.experts)}
        return about | of_run | self.job.record

    def finish(self, merged: NamedTensors, out: Any, last: Any = None) -> nn.Module | Path:
        """Return a module of what `run` yielded, or write the folder `out`, to which `last` adds."""
        tensors, base = self._all_tensors(merged), self.form.model
        folders = {n: Path(e) for n, e in self.experts.items() if not isinstance(e, nn.Module)}
        modules, class_name = list[str](), self.form.architecture
        if not isinstance(base, nn.Module):
            modules = merge_modules(Path(base), folders)  # sentences on a sentence encoder's
            class_name = card.SENTENCE_CLASS if encodes_sentences(Path(base)) else class_name
        if out is None:
            if modules:
                warnings.warn(f"only in a folder (out=): {' '.join(modules)}", stacklevel=3)
            return self.form.result(tensors, None)
        for line in modules:
            self.job.progress(line)
        name, settings, experts = self.method.name, self.settings, self.experts
        models = counted(len(experts), "fine-tuned model")
        about = f"`{name}`, {self.method.source}. {self.method.note}"
        text = card.render_card(
            f"{card.name_of(base)}: {counted(len(experts), 'expert')} merged",
            f"{models} merged into one by `{name}` (featcal {__version__}).",
            {"base": base} | {f"expert {task}": experts[task] for task in sorted(experts)},
            list(settings.items()),
            {"merge_method": name},
            method=" ".join([about, *modules]).strip(),
            class_name=class_name,
        )
        record = {"method": name, "settings": settings} | card.models_record(base, experts, out)

        def complete(folder: Path) -> None:
            if not isinstance(base, nn.Module):
                merge_modules(Path(base), folders, folder)
            if merge_record := self.record:
                write_json(folder / "merge.json", merge_record)
            write_json(folder / card.RECORD, record)
            card.write_card(folder, text)
            if last:
                last(folder)

        return self.form.result(tensors, out, complete)

    def _all_tensors(self, merged: NamedTensors) -> NamedTensors:
        """Yield counters, merged tensors, then those that stay the base's."""
        job = self.job
        for name in sorted(job.base.keys() - set(job.names)):
            counter = job.base[name].finite()
            for expert in job.experts.values():
                same = torch.equal(counter, expert[name].finite())
                if not (same or name.endswith("num_batches_tracked")):  # no answer depends on it
                    base_file, expert_file = job.base[name].file, expert[name].file
                    raise TensorsDiffer(name, base_file, "one value", expert_file, "another")
            yield name, counter
        for name, tensor in merged:
            if self.method.scaled:
                tensor = add_task_vector(
                    job.base[name].finite().to(tensor.device), tensor, self.settings["scale"]
                )  # no name keeps the base's tensor in memory
            negative = name.endswith("running_var") and bool((tensor < 0).any())
            if negative or not all_finite(tensor):
                problem = f"{self.method.name} gives NaN, infinite values or negative variances"
                lower = "lower the method's scale or rate, or use the method average, or"
                wider = "give models in float32, whose range is wider"
                raise FeatCalError(name, problem, lower, wider)
            yield name, tensor
        for name, lazy in self.unmerged.items():
            yield name, lazy.finite()


def open_merge(
    method: str,
    base: Model,
    experts: Mapping[str, Model] | Sequence[Model],
    *,
    batches: TaskBatches | None = None,
    head: str | Path | Mapping[str, Tensor] | None = None,
    embeddings: str = "merge",
    device: str | torch.device = "cpu",
    progress: Callable[[str], None] | None = None,
    n_jobs: int = 1,
    **settings: Any,
) -> OpenedMerge:
    """Open and check the merge that `merge` is asked for. Raises: as `merge`."""
    entry, checked_settings = method_named(method), settings_of(method, settings)
    entry.check_needs({"batches": batches, "head": head})
    valid = embeddings in ("merge", "base")
    require(valid, "merge.embeddings", embeddings, "must be merge or base")
    require(n_jobs > 0, "merge.n_jobs", n_jobs, "must be at least 1")
    progress = progress or (lambda line: None)
    if isinstance(experts, Sequence) and not isinstance(experts, str):
        experts = {f"{i:03d}": expert for i, expert in enumerate(experts)}
    check_named(experts, "merge.experts")
    if batches is not None:
        check_tasks(experts, batches)
    experts = {task: unwrapped(expert) for task, expert in experts.items()}
    plain = without_adapters(base) if isinstance(base, nn.Module) else base
    form = Form.of(plain, experts)
    opened = {"": form.source}  # by task, the base under ""
    for task, expert in sorted(experts.items()):
        label = f"expert {task!r}"
        opened[task] = sources.source(expert, label, form.part, form.source, form.model)
    configs = {}
    for task, model in opened.items():
        label = f"expert {task!r}" if task else "base"
        folder = f" ({model.files.folder})" if isinstance(model, ModelCheckpoint) else ""
        configs[label + folder] = getattr(model.module, "config", None)
    require_same_configs(configs)
    ends = {label: str(getattr(c, "eos_token_id", None)) for label, c in configs.items()}
    if len({*ends.values()}) > 1:  # else what was merged may never end
        listed = ", ".join(f"{end} in {label}" for label, end in ends.items())
        progress(f"eos_token_id differs ({listed}); the base's is written, with its chat template")
    kinds = [type(model.module) for model in opened.values()]
    report_labels(kinds, configs.values(), "heads are merged", progress)
    untied = sources.untied_names(form.source, [opened[task].tensors for task in experts])
    # the tensors of each model that its class and another model lack
    surplus = {task: {n for n, _ in getattr(m, "surplus", ())} for task, m in opened.items()}
    in_all = set.intersection(*surplus.values())
    head_names = {task: names - in_all for task, names in surplus.items()}

    def without_head(task: str) -> Tensors:
        tensors = opened[task].tensors
        copies = {name: tensors[tied] for name, tied in untied.items() if tied in tensors}
        shared = {name: t for name, t in tensors.items() if name not in head_names[task]}
        return dict(sorted({**copies, **shared}.items()))

    base_tensors = without_head("")
    tensors = {task: without_head(task) for task in sorted(experts)}
    tensors, unmerged = sources.align(base_tensors, tensors, form.model, experts, progress)
    for task, expert in tensors.items():
        sources.report_head(task, head_names[task] | (unmerged & expert.keys()), progress)
    base_tensors, tensors = sources.in_one_precision(base_tensors, tensors, progress)
    form = replace(form, untied=untied, merged=base_tensors)
    if embeddings == "base":
        names = {*form.source.tensors}.union(*tensors.values())
        unmerged |= {name for name in names if is_vocabulary(name)}

    def to_merge(model: Tensors) -> Tensors:
        return {name: tensor for name, tensor in model.items() if name not in unmerged}

    job = MergeJob(
        base=to_merge(base_tensors),
        experts={task: to_merge(expert) for task, expert in tensors.items()},
        structure=form.module,
        batches=batches or {},
        head=read_head(head, tensors) if head is not None else {},
        device=load.torch_device(device),
        progress=progress,
        n_jobs=n_jobs,
    )
    sources.require_alike(job.base, job.experts)
    for model in opened.values():  # transformers would initialise missing tensors at random
        if isinstance(model, ModelCheckpoint):
            model.require_complete(heads=True, surplus=True)
    from_base = {name: base_tensors[name] for name in sorted(unmerged) if name in base_tensors}
    from_base |= {name: form.source.tensors[name] for name in sorted(head_names[""])}
    return OpenedMerge(entry, checked_settings, job, from_base, form, experts)


def read_head(head: str | Path | Mapping[str, Tensor], tasks: Iterable[str]) -> dict[str, Tensor]:
    """Return logit_scale (), head/<task> (K, p) and, for images, visual_projection (p, h)."""
    if isinstance(head, Mapping):
        tensors, label = head, "head"
    elif not Path(head).is_file():
        way_out = "give a heads.safetensors, or its tensors in a dictionary"
        raise MissingPath(head, "zero-shot heads", way_out)
    else:
        tensors, label = read_safetensors(Path(head)), str(head)
    heads = [f"head/{task}" for task in tasks]
    wanted = [*([PROJECTION] if PROJECTION in tensors else []), LOGIT_SCALE, *heads]
    if missing := [name for name in wanted if name not in tensors]:
        raise MissingTensor(label, missing[0], tensors.keys())
    p = tensors[PROJECTION].shape[0] if PROJECTION in tensors else tensors[heads[0]].shape[-1]
    for name in heads:
        fits = tensors[name].shape[1:] == (p,) and bool(tensors[name].isfinite().all())
        expected = f"must be a finite matrix with rows of {p} values"
        require(fits, f"merge.head[{name!r}]", (*tensors[name].shape,), expected)
    return {name: tensors[name] for name in wanted}
