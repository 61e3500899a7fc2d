"""Modules and checkpoint folders as sources of tensors by name, and the check that they fit."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from featcal.errors import MissingTensor, TensorsDiffer
from featcal.models.save import untied
from featcal.storage.checkpoint import LazyCheckpoint, require_numbers

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


class Source(Protocol):
    """A model as merging reads it: names, shapes, dtypes, and one tensor at a time."""

    @property
    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def file_of(self, name: str) -> object: ...
    def finite_tensor(self, name: str) -> Tensor: ...


class ModuleSource:
    """A module in memory as a source; `label` replaces the file name in messages."""

    def __init__(self, module: nn.Module, label: str):
        self._label = label
        self._state = untied(module)

    @property
    def names(self) -> list[str]:
        return sorted(self._state)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._state[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._state[name].dtype

    def file_of(self, name: str) -> str:
        return self._label

    def finite_tensor(self, name: str) -> Tensor:
        require_numbers(self._label, name, self._state[name], weight=name.endswith("weight"))
        return self._state[name].detach().cpu()


@dataclass
class Derived:
    """A source that forwards to another one; subclasses change parts of it."""

    inner: Source

    @property
    def names(self) -> list[str]:
        return self.inner.names

    def shape(self, name: str) -> tuple[int, ...]:
        return self.inner.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self.inner.dtype(name)

    def file_of(self, name: str) -> object:
        return self.inner.file_of(name)

    def finite_tensor(self, name: str) -> Tensor:
        return self.inner.finite_tensor(name)


@dataclass
class Without(Derived):
    """A source with some of its tensors hidden."""

    hidden: frozenset[str]

    @property
    def names(self) -> list[str]:
        return [name for name in self.inner.names if name not in self.hidden]


def kept_embeddings(
    base: Source, experts: dict[str, Source], keep: bool, apart: frozenset[str] = frozenset()
) -> tuple[list[str], Source, dict[str, Source]]:
    """Return the names of tensors that stay the base's, and all models without them.

    keep: keep the base's token tables, for experts with other vocabularies.   apart: further
    tensors that stay the base's.
    """
    hidden = apart | frozenset(
        n for s in (base, *experts.values()) for n in s.names if keep and is_vocabulary(n)
    )
    if not hidden:
        return [], base, experts
    kept = [name for name in base.names if name in hidden]
    return (
        kept,
        Without(base, hidden),
        {t: Without(expert, hidden) for t, expert in experts.items()},
    )


def source(model: nn.Module | str | Path, label: str, part: str | None = None) -> Source:
    """Open a module or a folder as a source. Raises: BadFile for a folder of integers."""
    if isinstance(model, nn.Module):
        return ModuleSource(model, label)
    checkpoint = LazyCheckpoint(model, part)
    checkpoint.require_floating()
    return checkpoint


def require_alike(base: Source, experts: Mapping[str, Source]) -> None:
    """Require the same tensor names, shapes and dtypes. Raises: MissingTensor, TensorsDiffer."""
    for expert in experts.values():
        for has, lacks in ((base, expert), (expert, base)):
            missing = sorted(set(has.names) - set(lacks.names))
            if missing:
                place = f"{lacks.file_of(lacks.names[0])} (beside {has.file_of(missing[0])})"
                raise MissingTensor(place, missing[0], lacks.names)
        for name in base.names:
            files = base.file_of(name), expert.file_of(name)
            if base.shape(name) != expert.shape(name):
                raise TensorsDiffer(name, files[0], base.shape(name), files[1], expert.shape(name))
            if base.dtype(name) != expert.dtype(name):
                raise types_differ(name, files, base.dtype(name), expert.dtype(name))


def types_differ(
    name: str, files: tuple[object, object], this: torch.dtype, that: torch.dtype
) -> TensorsDiffer:
    """Return the error for one tensor stored in two types, with the lines that convert a model."""
    short = str(this).removeprefix("torch.")
    way_out = (
        "save the second model in the type of the first, with its own class of transformers:\n"
        f"    model = CLIPVisionModel.from_pretrained(folder, dtype={short!r}); model.save_pretrained(new_folder)"
    )
    return TensorsDiffer(name, files[0], this, files[1], that, way_out)
