"""Adapters of peft, such as LoRA, added to the weights of their base by peft itself.

LoRA's dense weight is W + (α / r) B A with A (r, inputs) and B (outputs, r). The base is read in
float32 or wider, so that the sum is not rounded to bfloat16. peft is imported only when needed.
"""

import copy
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPVisionModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from featcal.errors import LOG, BadFile, as_bad_file, optional_package
from featcal.files import read_json
from featcal.models import checkpoint
from featcal.models.batch import Model
from featcal.models.checkpoint import ADAPTER as CONFIG
from featcal.models.load import copy_other_files, load_as_calibrated, model_class, save_model
from featcal.models.modules import tied_names

Tensors = dict[str, Tensor]  # by name
WEIGHTS = "adapter_model.safetensors"
ROOT = "base_model.model."  # peft's prefix of all names
# of a CLIPModel what is not its vision tower
NOT_VISION = re.compile(rf"{re.escape(ROOT)}(text_model|(text|visual)_projection|logit_scale)\b")
# what peft adds to the names of a model's own parameters
PEFT_NAMES = re.compile(r"^base_model\.model\.|\b(base_layer|original_module|token_adapter)\.")
NO_WEIGHTS = {  # settings of adapters that do more than change weights
    "layer_replication": "repeats layers of the base",
    "alora_invocation_tokens": "acts only after certain tokens",
    "arrow_config": "chooses between adapters at every token",
}
SHARED = re.compile(r"\.(vblora_vector_bank|tinylora_v)\.")  # stored once for all layers


def dense_model(
    base: Model,
    adapter: str | Path,
    precision: torch.dtype | None = None,
    load: Callable[[Any, torch.dtype], nn.Module] = load_as_calibrated,
) -> Any:
    """Return a copy of the base, a module or a folder that `load` reads, with an adapter added."""
    if isinstance(base, nn.Module):
        model = copied(without_adapters(base))
    else:
        wide = any(tensor.kind == "float64" for tensor in checkpoint.LazyCheckpoint(base).values())
        model = load(base, torch.float64 if wide else torch.float32)
    return merged_adapter(with_adapter(model, adapter), adapter, precision)


def dense_folder(base: Path, adapter: Path, out: Path) -> Path:
    """Write the base with the adapter added as a model folder. Raises: as dense_model; DiskFull."""
    save_model(dense_model(base, adapter), out, like=base)
    copy_other_files(adapter, out)  # such as a SentenceTransformer's modules
    inputs = [adapter / CONFIG, adapter / WEIGHTS, base / "config.json"]
    newest = max(file.stat().st_mtime_ns for file in (*inputs, *base.glob("*.safetensors")))
    for file in out.rglob("*"):  # a resumed run recognises the files by this date
        os.utime(file, ns=(newest, newest))
    return out


def with_adapter(model: nn.Module, folder: str | Path) -> Any:
    """Return the model as a PeftModel; it is changed in place, and may be on meta. Raises: BadFile."""
    peft, folder, example = peft_package(), checkpoint.folder_path(folder), next(model.parameters())
    with _as_bad_file(folder / CONFIG, "cannot be read", "save the adapter again with peft"):
        config: Any = peft.PeftConfig.from_pretrained(str(folder))
    _require_mergeable(config, folder / CONFIG)
    used_keys = {key for key, value in read_json(folder / CONFIG).items() if value}
    if ignored := ", ".join(sorted(used_keys - config.to_dict().keys())):
        LOG.warning("%s: the installed peft ignores %s", folder / CONFIG, ignored)
    if not (folder / WEIGHTS).is_file():
        raise checkpoint.no_safetensors(folder, WEIGHTS)
    tensors = checkpoint.read_safetensors(folder / WEIGHTS)
    plain_names = {PEFT_NAMES.sub("", name): tensor for name, tensor in tensors.items()}
    checkpoint.require_plain(folder / WEIGHTS, plain_names)
    config.base_model_name_or_path = config.task_type = None  # the base is given
    model = model.to(torch.promote_types(example.dtype, torch.float32))
    problem = f"does not fit the base, a {type(model).__name__}"
    way_out = "give the base that it was trained on, with the same vocabulary and class"
    start = getattr(config, "init_lora_weights", True)
    if isinstance(start, str) and start != "gaussian":
        problem = f"peft cannot repeat its start, init_lora_weights={start!r}"
        how = "model.save_pretrained(folder, path_initial_model_for_weight_conversion=...)"
        way_out = f"write it as a plain LoRA where it was trained: {how}"
        if start.startswith(("pissa_niter", "lora_ga")):
            raise BadFile(folder, f"{problem} (drawn at random, or from gradients)", way_out)
        if example.is_meta:  # nothing to decompose, as PiSSA and OLoRA do
            config.init_lora_weights = False
    heads = [f".{name}." for name in getattr(config, "modules_to_save", None) or ()]
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    # peft draws an adapter before it is loaded, and warns of what is checked below
    with _as_bad_file(folder, problem, way_out):
        tensors = _present_names(tensors, model, config, heads)
        # an adapter that was trained with other tokens holds all token tables
        rows = {PEFT_NAMES.sub("", name): len(t) for name, t in tensors.items() if t.dim()}
        sizes = {rows.get(n) for n, p in model.named_parameters() if p.ndim == 2 and len(p) == size}
        with torch.random.fork_rng(devices=[]):
            if len(sizes) == 1 and None not in sizes:
                model.resize_token_embeddings(sizes.pop(), mean_resizing=False)
            adapted = peft.get_peft_model(model, config, low_cpu_mem_usage=example.is_meta)
        loaded = peft.set_peft_model_state_dict(adapted, tensors, low_cpu_mem_usage=example.is_meta)
    unread = sorted(loaded.unexpected_keys)
    # a base may lack the adapter's heads
    if in_heads := [name for name in unread if any(head in name for head in heads)]:
        LOG.warning("%s: its own head is not merged (%s)", folder, ", ".join(in_heads))
    surplus = [name for name in unread if name not in in_heads]
    prefix = peft.mapping.PEFT_TYPE_TO_PREFIX_MAPPING[config.peft_type]
    missing = [n for n in loaded.missing_keys if f".{prefix}" in n and not SHARED.search(n)]
    for names, reason in ((surplus, "the base has no"), (missing, "the file has no")):
        if names:
            way_out = "save the whole adapter again" if names is missing else way_out
            raise BadFile(folder, f"{problem} ({reason} {', '.join(sorted(names)[:3])})", way_out)
    return adapted


def _present_names(tensors: Tensors, model: nn.Module, config: Any, heads: list[str]) -> Tensors:
    """Return tensors by the model's own names; the configuration then lists its layers by them.

    Modules may have been renamed since, as a ViT's, and only one of both may have a head.
    """
    peft, paths = peft_package(), dict(model.named_modules())
    if isinstance(model, CLIPVisionModel):  # of a CLIPModel's adapter the vision tower
        tensors = {name: t for name, t in tensors.items() if not NOT_VISION.match(name)}
    kind = peft.mapping.PEFT_TYPE_TO_PREFIX_MAPPING[config.peft_type]
    layer_of = partial(re.sub, rf"\.({kind}|base_layer\b|token_adapter\b).*|\.(weight|bias)$", "")
    names = {name: name.removeprefix(ROOT) for name in tensors if name.startswith(ROOT)}
    in_tower = [name for name in names if not any(head in name for head in heads)]
    changes = [c for c in get_model_conversion_mapping(model) if isinstance(c, WeightRenaming)]
    tower = f"{getattr(model, 'base_model_prefix', '')}."
    # the last is the prefix of a CLIP vision tower in a CLIPModel, and before transformers 5
    unknown = {n: own for n, own in names.items() if layer_of(own) not in paths}
    renamed = names | {n: rename_source_key(own, changes, [])[0] for n, own in unknown.items()}
    for old, new in (("", ""), ("", tower), (tower, ""), ("vision_model.", "")):
        present = {n: new + own.removeprefix(old) for n, own in renamed.items()}
        layers = {n: layer_of(own) for n, own in present.items()}
        if all(layers[name] in paths for name in in_tower):
            break
    else:
        return tensors  # peft may know how to convert them, as those of experts that are packed now
    if present == names:
        return tensors
    in_packed = getattr(config, "target_parameters", None) or ()
    packed = tuple(f".{name.rpartition('.')[0]}" for name in in_packed)
    adapted = {n for n in in_tower if f".{kind}" in n and not f".{layers[n]}".endswith(packed)}
    config.target_modules = sorted({layers[name] for name in adapted})
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    for key in ("rank_pattern", "alpha_pattern"):  # regular expressions of names
        if patterns := getattr(config, key, None):
            before = {layers[n]: layer_of(names[n]) for n in adapted}
            keys = {n: peft.utils.other.get_pattern_key(patterns, old) for n, old in before.items()}
            setattr(config, key, {n: patterns[old] for n, old in keys.items() if old in patterns})
    return {ROOT + present[name] if name in names else name: t for name, t in tensors.items()}


def _require_mergeable(config: Any, source: str | Path) -> None:
    """Raise BadFile for an adapter that does more than change the base's weights."""
    tuner = peft_package().mapping.PEFT_TYPE_TO_TUNER_MAPPING.get(config.peft_type)
    used_keys = [key for key in NO_WEIGHTS if getattr(config, key, None)]
    problems = [f"{key} is set: the adapter {NO_WEIGHTS[key]}" for key in used_keys]
    if not hasattr(tuner, "merge_and_unload"):
        problems = [f"an adapter of the kind {config.peft_type and config.peft_type.value}"]
    if problems:
        way_out = "only adapters that peft merges into weights, such as LoRA, can be used"
        raise BadFile(source, problems[0], way_out)


@contextmanager
def _as_bad_file(file: str | Path, problem: str, way_out: str) -> Iterator[None]:
    """Raise peft's errors inside the `with` as BadFile, and silence its warnings."""
    with as_bad_file(file, problem, way_out), warnings.catch_warnings(action="ignore"):
        yield


def merged_adapter(adapted: Any, source: str | Path, precision: torch.dtype | None = None) -> Any:
    """Turn a PeftModel into its plain model, with layers in `precision`. Raises: BadFile."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in adapted.modules() if isinstance(module, BaseTunerLayer)]
    if any(layer.disable_adapters for layer in layers):
        raise BadFile(source, "its adapter is switched off", "switch it on, or give the base alone")
    ties = [names for names in tied_names(adapted) if len(names) > 1]
    tied = {id(adapted.get_parameter(names[0])) for names in ties}
    for layer in layers:
        base = layer.get_base_layer()
        for name, p in list(base.named_parameters(recurse=False)):
            if id(p) in tied:  # merging must not change the parameter that it is tied to
                setattr(base, name, nn.Parameter(p.detach().clone(), requires_grad=False))
        if precision is not None:
            layer.to(precision)  # type: ignore[attr-defined]
    way_out = "give a folder of the whole expert, or an adapter that peft can merge"
    with torch.no_grad(), _as_bad_file(source, "peft cannot merge it into the base", way_out):
        config = copy.deepcopy(adapted.get_base_model().config)
        dense = adapted.merge_and_unload().eval()
    dense.config = config  # peft may have changed tie_word_embeddings
    parameters = dict(dense.named_parameters(remove_duplicate=False))
    for names in ties:
        present = [n for name in names if (n := PEFT_NAMES.sub("", name)) in parameters]
        if len(present) > 1:
            _tie_or_untie(dense, present, source)
    return dense


def _tie_or_untie(dense: Any, names: list[str], source: str | Path) -> None:
    """Tie equal tensors of these names again, else untie the configuration. Raises: BadFile."""
    first, *others = (dense.get_parameter(name) for name in names)
    if all(torch.equal(first, other.to(first.dtype)) for other in others):
        for name in names[1:]:
            parent, _, attribute = name.rpartition(".")
            setattr(dense.get_submodule(parent), attribute, first)
        return
    config = untied_config(dense.config)
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        untied = type(dense)._from_config(config)
    if len(names) > 2 or tied_names(untied) != tied_names(dense):
        problem = f"changes one of {' and '.join(names)}, which the base ties to each other"
        way_out = "save the base with tie_word_embeddings=False, or train the adapter without"
        raise BadFile(source, problem, way_out)
    dense.config = config


def untied_config(config: Any) -> Any:
    """Return a copy of a configuration that does not tie a language model's table and head."""
    config = copy.deepcopy(config)
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    return config


def unwrapped(model: Any) -> Any:
    """Return a model without the wrappers of torch.compile, DataParallel and mixed precision."""
    parallel = nn.DataParallel, nn.parallel.DistributedDataParallel
    while isinstance(model, parallel) or hasattr(model, "_orig_mod"):  # of torch.compile
        model = model.module if isinstance(model, parallel) else model._orig_mod
    if "_original_forward" in getattr(model, "__dict__", ()) and not hasattr(model, "_hf_hook"):
        model = copy.copy(model)  # with the same parts, but not in accelerate's autocast
        del model.forward, model._original_forward
    return model


def without_adapters(model: Any, precision: torch.dtype | None = None) -> Any:
    """Return the plain model of a PeftModel in memory, as a copy; others unwrapped."""
    model, name = unwrapped(model), type(model).__name__
    if is_peft(model):
        for adapter in model.active_adapters:
            _require_mergeable(model.peft_config[adapter], name)
        model = merged_adapter(copied(model), name, precision)
    for key, value in model.state_dict().items():
        if "base_layer." in key:
            way_out = "give a PeftModel, or merge_and_unload() it; load a wrapped base again"
            raise BadFile(name, "holds an adapter's layers, but is no PeftModel", way_out)
        if not isinstance(value, Tensor) and not key.endswith("_extra_state"):
            problem = f"{key} is no tensor, as in quantised models"
            raise BadFile(name, problem, "give the model it was quantised from")
    for path, part in model.named_modules():
        if isinstance(part, nn.Linear | Conv1D) and not isinstance(part.weight, nn.Parameter):
            way_out = "make it a parameter: prune.remove or parametrize.remove_parametrizations do"
            raise BadFile(name, f"{path} computes its weight, as after pruning", way_out)
    return model


def copied(model: nn.Module) -> Any:
    """Return a deep copy that is not compiled. Raises: BadFile for what would share weights."""
    name, first, memo = type(model).__name__, dict[object, nn.Parameter](), dict[int, Any]()
    with _as_bad_file(name, "cannot be copied", "save it, and give its folder"):
        for p in model.parameters():  # those in one memory stay tied
            memory = p.data_ptr() or id(p), p.shape, p.stride()
            memo[id(p)] = copy.deepcopy(first.setdefault(memory, p), memo)
        module = copy.deepcopy(model, memo)
        for path, part in module.named_modules():
            forward = None if hasattr(part, "_orig_mod") else vars(part).get("forward")
            if hasattr(forward, "_torchdynamo_orig_callable"):  # compiled, with the given weights
                del part.forward
            elif isinstance(forward, FunctionType):
                raise ValueError(f"{path or name} has a forward of its own")
    return module


def is_peft(model: object) -> bool:
    """Return whether a model is a PeftModel, without importing peft."""
    kind = type(model)  # a LoraModel or PeftMixedModel is none
    return kind.__module__.startswith("peft.") and hasattr(kind, "get_base_model")


def class_of(model: Any) -> type:
    """Return the class of a model, or of a PeftModel's base. Raises: MissingPath, BadFile."""
    if isinstance(model, nn.Module):
        return type(model.get_base_model() if is_peft(model) else model)
    return model_class(model)


def peft_package() -> Any:
    """Return the package peft. Raises: BadEnvironment if it is not installed."""
    return optional_package("peft", "lora", "adapters")
