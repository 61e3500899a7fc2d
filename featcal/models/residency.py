"""A model as the calibrator sees it: given as a module, or as a folder of which only what computes
is in memory.

Knows neither tasks nor settings.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from torch import nn

from featcal.blocks.experts import unpacked
from featcal.blocks.plan import part_of
from featcal.errors import MissingTensor, TensorsDiffer
from featcal.models.skeleton import require_one_family
from featcal.storage.checkpoint import require_numbers


class Held(Protocol):
    """A model of which parts are asked for by path."""

    @property
    def module(self) -> nn.Module:
        """The whole model; its parameters may be on meta."""

    def block(self, path: str) -> AbstractContextManager[nn.Module]:
        """The submodule, its parameters really there; packed experts are linears."""

    def running(self) -> AbstractContextManager[nn.Module]:
        """The model, its own forward working."""

    def read(self, path: str) -> None:
        """A hint that `block(path)` comes next."""

    def forget(self, path: str) -> None:
        """Takes the hint back."""

    def check_finite(self, place: str = "") -> None:
        """Raises NotFinite or BadData unless every tensor holds numbers; `place`: how errors call a
        model without a folder.
        """


class Resident:
    """A module that was given, wholly in memory."""

    def __init__(self, module: nn.Module):
        self.module = module

    @contextmanager
    def block(self, path: str) -> Iterator[nn.Module]:
        part = part_of(self.module, path)
        with unpacked(part):
            yield part

    def running(self) -> AbstractContextManager[nn.Module]:
        return nullcontext(self.module)

    def read(self, path: str) -> None:
        pass

    def forget(self, path: str) -> None:
        pass

    def check_finite(self, place: str = "") -> None:
        place = place or type(self.module).__name__
        for name, parameter in self.module.named_parameters():
            require_numbers(place, name, parameter)


def in_turn(held: Mapping[str, Held], path: str) -> Iterator[tuple[str, nn.Module]]:
    """One block of every model after another, by name; while the caller has one, the next is read.

    At most these two are in memory; when the iterator is closed early, neither is.
    """
    names = sorted(held)
    try:
        for name, following in zip(names, [*names[1:], ""], strict=True):
            with held[name].block(path) as block:
                if following:
                    held[following].read(path)
                yield name, block
    finally:
        for each in held.values():
            each.forget(path)


def tensors(held: Held) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters by name, tied ones under every name; of a folder known from headers
    alone.
    """
    return {
        name: tuple(p.shape) for name, p in held.module.named_parameters(remove_duplicate=False)
    }


def require_alike(models: Mapping[str, Held], blocks: Sequence[str] | None = None) -> None:
    """Raise MissingTensor or TensorsDiffer unless all models, by the name errors use, are of the
    first one's family and have its names and shapes.

    blocks: paths outside of which the number of rows may differ; none where None.
    """
    require_one_family({label: type(held.module) for label, held in models.items()})
    (here, reference), *others = ((label, tensors(held)) for label, held in models.items())
    for there, found in others:
        for name, shape in reference.items():
            if name not in found:
                raise MissingTensor(there, name, found)
            free = blocks is not None and not any(name.startswith(f"{path}.") for path in blocks)
            if found[name] != shape and not (free and found[name][1:] == shape[1:]):
                raise TensorsDiffer(name, here, list(shape), there, list(found[name]))
        for name in found.keys() - reference.keys():
            raise MissingTensor(here, name, reference)
