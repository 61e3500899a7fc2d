"""Tensors read by a thread while the caller does something else, counted from the moment the
reading starts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from featcal.errors import MissingTensor, TensorsDiffer
from featcal.files import Ledger
from featcal.models.checkpoint import LazyCheckpoint, folder_path, require_numbers
from featcal.models.load import require_one_family, skeleton
from featcal.models.moe import unpacked
from featcal.models.plan import part_of
from featcal.models.stored import Instead, Parameters, nothing


class ReadAhead:
    """One reading under way: `taken` waits for it, `dropped` forgets it; after either its thread is
    gone.

    sizes: bytes by name.  read: gives the tensor of a name; what it raises is raised by `taken`.
    """

    def __init__(self, sizes: Mapping[str, int], read: Callable[[str], Tensor], ledger: Ledger):
        self._bytes, self._ledger = sum(sizes.values()), ledger
        ledger.add(self._bytes)
        self._thread = ThreadPoolExecutor(1, "featcal-read")
        self._tensors = self._thread.submit(lambda: {name: read(name) for name in sizes})

    def taken(self) -> dict[str, Tensor]:
        """The tensors, which are the caller's to count from here on."""
        try:
            return self._tensors.result()
        finally:
            self.dropped()

    def dropped(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._ledger.remove(self._bytes)


class ModelHandle(Protocol):
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


class InMemoryModel:
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


def in_turn(held: Mapping[str, ModelHandle], path: str) -> Iterator[tuple[str, nn.Module]]:
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


def tensors(held: ModelHandle) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters by name, tied ones under every name; of a folder known from headers
    alone.
    """
    return {
        name: tuple(p.shape) for name, p in held.module.named_parameters(remove_duplicate=False)
    }


def require_alike(models: Mapping[str, ModelHandle], blocks: Sequence[str] | None = None) -> None:
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


class StreamedModel:
    """The model of a folder; `module` has its parameters on meta, except inside of `block` and
    `running`.

    blocks: paths of the lists of blocks, as in a plan; other outermost lists of modules are treated
    alike.
    dtype:  what parameters are loaded as, whatever the file holds.
    ledger: counts the bytes of the parameters in memory, in the module or read ahead; one ledger
    may serve several models.
    instead: by name what is loaded in the place of what the folder holds, None where that is; what
    is read ahead is the folder's.
    like:   a class to take the folder's tower into, whose own head may be missing; what stands on
            the folder's is left out.
    Raises, as every name and shape is settled here: what skeleton, LazyCheckpoint and
    stored_tensors raise.
    """

    def __init__(
        self,
        folder: str | Path,
        blocks: Sequence[str] = (),
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        ledger: Ledger | None = None,
        instead: Instead = nothing,
        like: type[PreTrainedModel] | None = None,
    ):
        self.folder, self.device, self.ledger = (
            folder_path(folder),
            torch.device(device),
            ledger or Ledger(),
        )
        self.module, part = skeleton(folder, dtype, self.device, like)
        self.checkpoint = LazyCheckpoint(folder, part)
        self.checkpoint.require_floating()
        self.parameters = Parameters(
            self.module, self.checkpoint, self.device, self.ledger, instead, like is not None
        )
        self._lists = lists_of_modules(self.module, blocks)
        self._ahead: dict[str, ReadAhead] = {}

    def check_finite(self, place: str = "") -> None:
        """Reads every tensor of the checkpoint once. Raises: NotFinite naming file and tensor."""
        self.checkpoint.check_finite()

    @contextmanager
    def block(self, path: str) -> Iterator[nn.Module]:
        """The submodule with ordinary parameters that may be written to, packed experts as linears;
        afterwards they are gone.
        """
        part = part_of(self.module, path)
        loaded: list[str] = []
        try:
            ahead = self._ahead.pop(path).taken() if path in self._ahead else None
            self.parameters.load(self.parameters.below(part), loaded, ahead)
            with unpacked(part):
                yield part
        finally:
            self.parameters.drop(loaded)

    @contextmanager
    def running(self) -> Iterator[nn.Module]:
        """Inside, the model's own forward works, and that of every part of it.

        What a block needs is there while that block computes; what lies outside is loaded when it
        first computes, and stays till the end. The first parameter is there from the beginning, as
        models tell by it on which device they are.
        """
        kept: list[str] = []
        own: list[tuple[nn.Module, Any]] = []
        try:
            self.parameters.load([self.parameters.first], kept)
            for module, names, inside in self._needs():
                own.append((module, vars(module).get("forward")))
                vars(module)["forward"] = self._loading(
                    module.forward, names, None if inside else kept
                )
            yield self.module
        finally:
            for module, forward in own:
                del vars(module)["forward"]
                if forward is not None:
                    vars(module)["forward"] = forward
            self.parameters.drop(kept)

    def read(self, path: str) -> None:
        """Starts reading a block in the background, to memory of the host; `block(path)` takes it,
        `forget(path)` drops it.
        """
        if path not in self._ahead:
            sizes = self.parameters.sizes(self.parameters.below(part_of(self.module, path)))
            self._ahead[path] = ReadAhead(sizes, self._on_host, self.ledger)

    def forget(self, path: str) -> None:
        """Drops what was read ahead and not taken, if anything was."""
        if path in self._ahead:
            self._ahead.pop(path).dropped()

    def _on_host(self, name: str) -> Tensor:
        tensor = self.parameters.stored(name)
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    def _needs(self) -> Iterator[tuple[nn.Module, list[str], bool]]:
        """Every module that computes, what it needs, and whether it lies inside of a block.

        A module needs all parameters below it, as some use those of their parts without running the
        parts; only what runs the blocks does not need them all at once, but its own, those of lists
        of parameters, which do not run either, and those of tables, of which some read the weight
        (DeBERTa's encoder its relative positions).
        """
        for path, module in self.module.named_modules():
            if computes(module):
                inside = any(path.startswith(f"{blocks}.") for blocks in self._lists)
                above = any(
                    f"{blocks}.".startswith(f"{path}." if path else "") for blocks in self._lists
                )
                parts = [
                    module,
                    *(
                        each
                        for each in module.children()
                        if isinstance(each, nn.Embedding) or not computes(each)
                    ),
                ]
                names = [name for part in parts for name in self.parameters.own(part)]
                yield module, names if above else self.parameters.below(module), inside

    def _loading(
        self, forward: Callable[..., Any], names: Iterable[str], kept: list[str] | None
    ) -> Callable[..., Any]:
        """A forward that has its parameters; hooks before it see the module without, so that they
        can stop at no cost.
        """

        @wraps(forward)
        def loading(*args: Any, **kwargs: Any) -> Any:
            loaded = [] if kept is None else kept
            try:
                self.parameters.load(names, loaded)
                return forward(*args, **kwargs)
            finally:
                if kept is None:
                    self.parameters.drop(loaded)

        return loading


def lists_of_modules(module: nn.Module, blocks: Sequence[str]) -> list[str]:
    """The given paths, and every outermost ModuleList that is neither inside of one of them nor
    around one.
    """
    lists = list(blocks)
    for path, each in module.named_modules():
        apart = not any(
            f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")
            for other in lists
        )
        if isinstance(each, nn.ModuleList) and apart:
            lists.append(path)
    return lists


def computes(module: nn.Module) -> bool:
    """Whether the module has a forward; lists of modules or parameters have none."""
    return type(module).forward is not nn.Module.forward
