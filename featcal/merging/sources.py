"""Modules and checkpoint folders as one thing: tensors by name, with a place to name in a message.

Here is also checked that a base and its experts can be merged at all, before anything is computed
or written.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from featcal.errors import MissingTensor, TensorsDiffer
from featcal.models.save import untied
from featcal.storage.checkpoint import LazyCheckpoint, require_numbers


class Source(Protocol):
    """What merging needs of a model: names, shapes, dtypes, and one tensor at a time."""

    @property
    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def file_of(self, name: str) -> object: ...
    def finite_tensor(self, name: str) -> Tensor: ...


class ModuleSource:
    """A module in memory as a source; `label` stands where a file name would in messages."""

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
    """A source that is as another one, but for what a subclass says otherwise."""

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


def source(model: nn.Module | str | Path, label: str, part: str | None = None) -> Source:
    """A module or a folder as a source. Raises: BadFile for a folder of whole numbers, and what
    opening it raises.
    """
    if isinstance(model, nn.Module):
        return ModuleSource(model, label)
    checkpoint = LazyCheckpoint(model, part)
    checkpoint.require_floating()
    return checkpoint


def require_alike(base: Source, experts: Mapping[str, Source]) -> None:
    """Same tensor names, shapes and dtypes everywhere. Raises: MissingTensor, TensorsDiffer naming
    both files.
    """
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
    """The error of one tensor stored in two types, with the lines that save a model in another
    one.
    """
    short = str(this).removeprefix("torch.")
    way_out = (
        "models are merged in one type: save the second one again in the type of the first, with its own class of transformers:\n"
        f"    model = CLIPVisionModel.from_pretrained(folder, dtype={short!r}); model.save_pretrained(new_folder)"
    )
    return TensorsDiffer(name, files[0], this, files[1], that, way_out)
