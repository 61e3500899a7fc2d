"""Models as sources of tensors by name: modules, checkpoint folders, LoRA adapters, and experts
with another vocabulary or head.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from featcal.models.batch import Model
from featcal.models.checkpoint import SINGLE, check_tensor, is_adapter
from featcal.models.load import load_model, load_vision
from featcal.models.lora import WEIGHTS, dense_model, without_adapters
from featcal.models.modules import tied_names
from featcal.models.save import untied
from featcal.models.stored import ModelCheckpoint

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
    """A module in memory as a source; `label` replaces the file name in messages.

    like: the base, whose names and packing of experts are used. The adapters of a PeftModel are
    added in float64, so that task vectors are not rounded.
    """

    def __init__(self, module: nn.Module, label: str | Path, like: "Source | None" = None):
        self._label, self.module, self.ties = label, module, tied_names(module)
        plain = without_adapters(module, torch.float64)
        state = untied(plain)
        self._state = like.from_module(state) if isinstance(like, ModelCheckpoint) else state
        self._narrow = next(module.parameters()).dtype if plain is not module else None

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self._state)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._state[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in the model; `finite_tensor` may be wider."""
        dtype = self._state[name].dtype
        return self._narrow if self._narrow and dtype == torch.float64 else dtype

    def file_of(self, name: str) -> str | Path:
        """Return the label."""
        return self._label

    def finite_tensor(self, name: str) -> Tensor:
        """Return a tensor on the CPU. Raises: NotFinite."""
        check_tensor(str(self._label), name, self._state[name], weight=name.endswith("weight"))
        return self._state[name].detach().cpu()


class AdapterSource(ModuleSource):
    """A folder of an adapter, added to the base by peft, as a source.

    The dense tensors are mapped from a temporary file, so that one dense model at a time is in
    memory. Layers with an adapter are float64 there, so that task vectors are not rounded.
    """

    def __init__(self, folder: str | Path, base: Model, like: "Source", part: str | None):
        load = load_vision if part else load_model
        dense = dense_model(base, folder, torch.float64, load)
        super().__init__(dense, Path(folder) / WEIGHTS, like)
        self.module, self._like = like.module, like
        self._folder = TemporaryDirectory(prefix="featcal-lora-")  # removed with this object
        file = Path(self._folder.name) / SINGLE
        save_file({n: t.detach().cpu().contiguous() for n, t in self._state.items()}, file)
        self._state = load_file(file)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the base's tensor; that of a table for a head that the base ties."""
        names = self._like.names
        return self._like.dtype(name if name in names else next(filter(is_vocabulary, names)))


@dataclass
class Derived:
    """A source that forwards to another one; subclasses change parts of it."""

    inner: "Source"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


# A model as merging reads it: names, shapes, dtypes, and one tensor at a time
Source = ModelCheckpoint | ModuleSource | Derived


@dataclass
class Aligned(Derived):
    """An expert under the base's names and with the base's vocabulary.

    known: base name -> expert name, for the tensors that are merged.
    rows:  for each token table, the expert's row for each row of the base, -1 for none.
    """

    base: Source
    known: Mapping[str, str]
    rows: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Return the base's names of the shared tensors, sorted."""
        return sorted(self.known)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, token tables with the base's rows."""
        return self.base.shape(name) if name in self.rows else self.inner.shape(self.known[name])

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in the expert."""
        return self.inner.dtype(self.known[name])

    def file_of(self, name: str) -> object:
        """Return the expert's file of a tensor, or a label."""
        return self.inner.file_of(self.known[name])

    def finite_tensor(self, name: str) -> Tensor:
        """Return a tensor on the CPU, token tables with the base's rows. Raises: NotFinite."""
        tensor = self.inner.finite_tensor(self.known[name])
        if name not in self.rows:
            return tensor
        table, rows = self.base.finite_tensor(name).to(tensor.dtype, copy=True), self.rows[name]
        table[rows >= 0] = tensor[rows[rows >= 0]]
        return table


def source(model: Model, label: str, part: str | None = None, like: Source | None = None) -> Source:
    """Open a module or a folder as a source, with the names and packing of `like`, the base's.
    Raises: BadFile for a folder of integers.
    """
    if isinstance(model, nn.Module):
        return ModuleSource(model, label, like)
    return ModelCheckpoint(model, part, like.module if isinstance(like, ModuleSource) else like)


def view(
    model: Source, more: Mapping[str, str] = {}, hidden: Collection[str] = frozenset()
) -> Source:
    """Return a source with more names for its tensors, or without the hidden ones."""
    known = {**more, **{name: name for name in model.names}}
    return Aligned(model, model, {n: own for n, own in known.items() if n not in hidden})


def expert_sources(
    experts: Mapping[str, Model], base: Model, origin: Source, part: str | None
) -> dict[str, Source]:
    """Return every expert as a source, sorted by task; `origin` is the base as a source."""
    return {
        task: AdapterSource(expert, base, origin, part)  # type: ignore[arg-type]
        if is_adapter(expert := experts[task])
        else source(expert, f"expert {task!r}", like=origin)
        for task in sorted(experts)
    }
