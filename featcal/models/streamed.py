"""Models of which only the parts that compute are in memory, read from their folder in time.

The next block is read by a thread while the current one computes, and counted from then on."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from featcal.errors import MissingTensor, TensorsDiffer
from featcal.files import Ledger
from featcal.models.capture import replaced_forwards
from featcal.models.checkpoint import LazyCheckpoint, check_tensor, folder_path
from featcal.models.load import require_one_family, skeleton
from featcal.models.moe import unpacked
from featcal.models.plan import part_of
from featcal.models.stored import Override, Parameters


class InMemoryModel:
    """A module that was given, wholly in memory; asked for parts as StreamedModel is."""

    def __init__(self, module: nn.Module):
        self.module = module

    @contextmanager
    def block(self, path: str) -> Iterator[nn.Module]:
        """Provide the submodule with packed experts as linears."""
        part = part_of(self.module, path)
        with unpacked(part):
            yield part

    def running(self) -> AbstractContextManager[nn.Module]:
        """Provide the model."""
        return nullcontext(self.module)

    def prefetch(self, path: str) -> None:
        """Do nothing."""

    def cancel(self, path: str) -> None:
        """Do nothing."""

    def check_finite(self, label: str = "") -> None:
        """Raise NotFinite or BadData unless all parameters hold finite floating-point values."""
        for name, parameter in self.module.named_parameters():
            check_tensor(label or type(self.module).__name__, name, parameter)


class Prefetch:
    """A reading thread for tensors of known size in bytes; `result` waits for it."""

    def __init__(self, sizes: Mapping[str, int], read: Callable[[str], Tensor], ledger: Ledger):
        self._bytes, self._ledger = sum(sizes.values()), ledger
        ledger.add(self._bytes)
        self._thread = ThreadPoolExecutor(1, "featcal-read")
        self._tensors = self._thread.submit(lambda: {name: read(name) for name in sizes})

    def result(self) -> dict[str, Tensor]:
        """Return the tensors, which the caller counts from here on; raise what `read` raised."""
        try:
            return self._tensors.result()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the thread and stop counting."""
        self._thread.shutdown(cancel_futures=True)
        self._ledger.remove(self._bytes)


class StreamedModel:
    """The model of a folder; parameters of `module` are on meta outside of `block` and `running`.

    Args:
        folder: a model's folder.
        blocks: paths of the lists of blocks, as in a plan; other outermost lists of modules are
            treated alike.
        dtype: of loaded parameters, whatever the file holds.
        device: of loaded parameters.
        ledger: counts the bytes of loaded and prefetched parameters; models may share one.
        override: by name a tensor to load instead of the folder's, or None; prefetched tensors are
            the folder's.
        like: class to load the folder's tower into, whose own head may be missing.

    Raises:
        What skeleton, LazyCheckpoint and stored_tensors raise: names and shapes are checked here.
    """

    def __init__(
        self,
        folder: str | Path,
        blocks: Sequence[str] = (),
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        ledger: Ledger | None = None,
        override: Override = lambda name: None,
        like: type[PreTrainedModel] | None = None,
    ):
        self.folder, self.device = folder_path(folder), torch.device(device)
        self.ledger = ledger or Ledger()
        self.module, part = skeleton(folder, dtype, self.device, like)
        self.checkpoint = LazyCheckpoint(folder, part)
        self.checkpoint.require_floating()
        self.parameters = Parameters(
            self.module, self.checkpoint, self.device, self.ledger, override, like is not None
        )
        self._lists = list(blocks)
        for path, each in self.module.named_modules():
            nested = any(
                f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")
                for other in self._lists
            )
            if isinstance(each, nn.ModuleList) and not nested:
                self._lists.append(path)
        self._prefetched: dict[str, Prefetch] = {}

    def check_finite(self, label: str = "") -> None:
        """Read every tensor once. Raises: NotFinite naming file and tensor."""
        self.checkpoint.check_finite()

    @contextmanager
    def block(self, path: str) -> Iterator[nn.Module]:
        """Load a submodule, packed experts as linears; changes to it are lost afterwards."""
        part = part_of(self.module, path)
        loaded: list[str] = []
        try:
            ready = self._prefetched.pop(path).result() if path in self._prefetched else None
            self.parameters.load(self.parameters.below(part), loaded, ready)
            with unpacked(part):
                yield part
        finally:
            self.parameters.drop(loaded)

    @contextmanager
    def running(self) -> Iterator[nn.Module]:
        """Let the forward of the model, and of each of its parts, load what it needs.

        Parameters of a block are loaded while it computes; others when first needed, and kept to
        the end. The first parameter is loaded at once, as models tell their device by it.
        """
        kept: list[str] = []
        forwards = [
            (module, self._loading(module.forward, names, None if inside else kept))
            for module, names, inside in self._needs()
        ]
        try:
            self.parameters.load([self.parameters.first], kept)
            with replaced_forwards(forwards):
                yield self.module
        finally:
            self.parameters.drop(kept)

    def prefetch(self, path: str) -> None:
        """Read a block in the background into host memory, for `block(path)` or `cancel(path)`."""
        if path not in self._prefetched:
            sizes = self.parameters.sizes(self.parameters.below(part_of(self.module, path)))
            self._prefetched[path] = Prefetch(sizes, self._on_host, self.ledger)

    def cancel(self, path: str) -> None:
        """Drop a prefetched block that was not used."""
        if path in self._prefetched:
            self._prefetched.pop(path).cancel()

    def _on_host(self, name: str) -> Tensor:
        tensor = self.parameters.stored(name)
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    def _needs(self) -> Iterator[tuple[nn.Module, list[str], bool]]:
        """Yield every module with a forward, the parameters it needs, and whether it is in a block.

        That is all parameters below it, as some modules read those of their parts. A module that
        contains blocks needs only its own, those of lists of parameters, and those of embeddings,
        whose weight some models read (DeBERTa's relative positions).
        """
        for path, module in self.module.named_modules():
            if not _computes(module):
                continue
            inside = any(path.startswith(f"{blocks}.") for blocks in self._lists)
            dotted = f"{path}." if path else ""
            if not any(f"{blocks}.".startswith(dotted) for blocks in self._lists):
                yield module, self.parameters.below(module), inside
                continue
            parts = [
                p for p in module.children() if isinstance(p, nn.Embedding) or not _computes(p)
            ]
            names = [name for part in (module, *parts) for name in self.parameters.own(part)]
            yield module, names, inside

    def _loading(
        self, forward: Callable[..., Any], names: Iterable[str], kept: list[str] | None
    ) -> Callable[..., Any]:
        """Return a forward that loads its parameters; pre-hooks run before and may stop it."""

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


ModelHandle = InMemoryModel | StreamedModel


def _computes(module: nn.Module) -> bool:
    """Return whether a module has a forward; lists of modules or parameters have none."""
    return type(module).forward is not nn.Module.forward


def in_turn(models: Mapping[str, ModelHandle], path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield one block of every model by name, reading the next while the caller uses one.

    At most two are in memory, and none once the iterator is closed.
    """
    names = sorted(models)
    try:
        for name, following in zip(names, [*names[1:], ""], strict=True):
            with models[name].block(path) as block:
                if following:
                    models[following].prefetch(path)
                yield name, block
    finally:
        for each in models.values():
            each.cancel(path)


def require_same_tensors(
    models: Mapping[str, ModelHandle], blocks: Sequence[str] | None = None
) -> None:
    """Raise MissingTensor or TensorsDiffer unless all models have one family, names and shapes.

    models: by label in errors. blocks: paths outside of which the number of rows may differ.
    """
    require_one_family({label: type(handle.module) for label, handle in models.items()})
    (here, reference), *others = ((label, _shapes(handle)) for label, handle in models.items())
    for there, shapes in others:
        for name, shape in reference.items():
            if name not in shapes:
                raise MissingTensor(there, name, shapes)
            free = blocks is not None and not any(name.startswith(f"{path}.") for path in blocks)
            if shapes[name] != shape and not (free and shapes[name][1:] == shape[1:]):
                raise TensorsDiffer(name, here, list(shape), there, list(shapes[name]))
        for name in shapes.keys() - reference.keys():
            raise MissingTensor(here, name, reference)


def _shapes(model: ModelHandle) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters by name, tied ones under every name."""
    named = model.module.named_parameters(remove_duplicate=False)
    return {name: tuple(parameter.shape) for name, parameter in named}
