"""Open models for merging: modules, checkpoint folders and adapters, as tensors by name."""

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from featcal.models.batch import Model
from featcal.models.checkpoint import SINGLE, LazyTensor, is_adapter
from featcal.models.load import load_model, load_vision
from featcal.models.lora import WEIGHTS, dense_model, without_adapters
from featcal.models.modules import tied_names
from featcal.models.save import untied
from featcal.models.stored import ModelCheckpoint

Tensors = Mapping[str, LazyTensor]  # a model as merging reads it, sorted by name

# Tables with one row per token: models with other vocabularies differ here in shape, and a row's
# direction says nothing about features.
VOCABULARY = (
    "*shared.weight",
    "*embed_tokens.weight",
    "*token_embedding.weight",
    "*wte.weight",
    "*word_embeddings.weight",
    "*lm_head.weight",
    "*lm_head.bias",
)


def is_vocabulary(name: str, patterns: tuple[str, ...] = VOCABULARY) -> bool:
    """Return whether a tensor's name is that of a table with one row per token."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class ModuleSource:
    """A module in memory as merging reads it; `label` is its file in errors.

    like: the base, whose names and packing of experts are used. The adapters of a PeftModel are
    added in float64, so that task vectors are not rounded.
    """

    def __init__(self, module: nn.Module, label: str | Path, like: "Source | None" = None):
        self.module, self.ties = module, tied_names(module)
        plain = without_adapters(module, torch.float64)
        state = untied(plain)
        if isinstance(like, ModelCheckpoint):
            state = like.from_module(state)
        narrow = next(module.parameters()).dtype if plain is not module else None
        self.tensors: dict[str, LazyTensor] = {}
        for name, tensor in sorted(state.items()):
            dtype = narrow if narrow and tensor.dtype == torch.float64 else tensor.dtype
            kind, shape = str(dtype).removeprefix("torch."), tuple(tensor.shape)
            self.tensors[name] = LazyTensor(name, label, kind, shape, tensor.detach().cpu)


Source = ModelCheckpoint | ModuleSource


def source(model: Model, label: str, part: str | None = None, like: Source | None = None) -> Source:
    """Open a module or a folder, with the names and packing of `like`, the base's.
    Raises: BadFile for a folder of integers.
    """
    if isinstance(model, nn.Module):
        return ModuleSource(model, label, like)
    return ModelCheckpoint(model, part, like.module if isinstance(like, ModuleSource) else like)


def adapter_source(folder: str | Path, base: Model, like: Source, part: str | None) -> Source:
    """Open a folder of an adapter, added to the base by peft.

    The dense tensors are mapped from a removed file, so that one dense model at a time is in
    memory. Layers with an adapter are float64 there, so that task vectors are not rounded.
    """
    dense = dense_model(base, folder, torch.float64, load_vision if part else load_model)
    opened = ModuleSource(dense, Path(folder) / WEIGHTS, like)
    with TemporaryDirectory(prefix="featcal-lora-") as scratch:
        file = Path(scratch) / SINGLE
        save_file({name: each.read().contiguous() for name, each in opened.tensors.items()}, file)
        mapped = load_file(file)
    # a table for a head that the base ties is like the base's
    tables = [each for name, each in like.tensors.items() if is_vocabulary(name)]
    for name, each in opened.tensors.items():
        kind = like.tensors[name].kind if name in like.tensors else tables[0].kind
        opened.tensors[name] = replace(each, kind=kind, read=mapped[name].cpu)
    opened.module = like.module
    return opened


def expert_sources(
    experts: Mapping[str, Model], base: Model, origin: Source, part: str | None
) -> dict[str, Source]:
    """Open every expert, sorted by task; `origin` is the opened base."""
    return {
        task: adapter_source(expert, base, origin, part)  # type: ignore[arg-type]
        if is_adapter(expert := experts[task])
        else source(expert, f"expert {task!r}", like=origin)
        for task in sorted(experts)
    }
