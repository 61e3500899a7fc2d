"""Find each tensor of a model in its checkpoint, by the names and conversions of transformers.

Headers alone decide what is tied, missing, surplus or misshapen, before any tensor is read."""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from featcal.errors import BadFile, MissingTensor, WrongKeys
from featcal.files import Ledger
from featcal.models.checkpoint import LazyCheckpoint

Read = Callable[[str], Tensor]
Override = Callable[[str], Tensor | None]  # by name a tensor to load instead of the stored one


@dataclass(frozen=True)
class Conversion:
    """One of transformers' conversions, e.g. of one stored matrix into two parameters."""

    converter: WeightConverter
    first: str  # of the names it makes
    module: PreTrainedModel
    sources: list[tuple[str, str]] = field(default_factory=list)  # stored name, matched pattern

    def apply(self, read: Read) -> dict[str, Tensor]:
        """Return the tensors it makes by name; they may share memory."""
        converter = deepcopy(self.converter)  # it collects what it is given
        for source, pattern in self.sources:
            converter.add_tensor(self.first, source, pattern, read(source))  # type: ignore[arg-type]
        made = converter.convert(self.first, model=self.module, config=self.module.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the model: stored in the checkpoint, or made of several that are."""

    name: str
    sources: tuple[str, ...]  # stored names
    shape: tuple[int, ...]
    conversion: Conversion | None = None

    def read(self, read: Read) -> Tensor:
        """Return the tensor in memory of its own; `read` reads each source."""
        if self.conversion is None:
            return read(self.sources[0])
        return self.conversion.apply(read)[self.name].clone()

    def to_sources(
        self, tensor: Tensor, shape_of: Callable[[str], tuple[int, ...]]
    ) -> dict[str, Tensor]:
        """Return the sources that `read` would make this tensor of.

        Empty if it is not made of whole rows of its sources. Converting tensors filled with their
        source's number shows which row comes from which source.
        """
        if len(self.sources) == 1:
            return {self.sources[0]: tensor}
        assert self.conversion is not None
        marks = {
            name: torch.full((*shape_of(name)[:-1], 1), number)
            for number, name in enumerate(self.sources)
        }
        made = self.conversion.apply(marks.__getitem__)[self.name]
        if made.shape != (*self.shape[:-1], 1):
            return {}
        return {
            name: tensor[made[..., 0] == number].reshape(shape_of(name))
            for number, name in enumerate(self.sources)
        }


def stored_tensors(
    module: PreTrainedModel, checkpoint: LazyCheckpoint, heads: bool = False
) -> dict[str, StoredTensor]:
    """Return by name every tensor of the model's state that the checkpoint holds.

    heads: the checkpoint's head may differ from the model's, or be missing.
    Raises: WrongKeys for surplus or misshapen tensors; MissingTensor for a parameter that is stored
    under none of its (tied) names; BadFile for an impossible conversion.
    """
    state = module.state_dict()
    stored: dict[str, StoredTensor] = {}
    surplus = []
    for each in _matches(module, checkpoint, state):
        if each.name in state and each.name not in stored:
            stored[each.name] = each
        else:
            surplus.append(each)
    misshapen = sorted(name for name in stored if stored[name].shape != tuple(state[name].shape))
    # transformers drops what old files hold although every model builds it itself
    keys: Any = SimpleNamespace(missing_keys=set(state) - set(stored))
    keys.unexpected_keys = {each.name for each in surplus}
    module._adjust_missing_and_unexpected_keys(keys)
    unexpected = sorted(each.sources[0] for each in surplus if each.name in keys.unexpected_keys)
    ties = tied_names(module)
    missing = [names[0] for names in ties if stored.keys().isdisjoint(names)]
    missing += sorted(set(keys.missing_keys).difference(*ties))  # buffers
    if heads:
        missing = [name for name in missing if not _in_head(name, module)]
        unexpected = [name for name in unexpected if not _in_head(name, module)]
    if unexpected or misshapen:
        raise WrongKeys(checkpoint.folder, type(module).__name__, missing, unexpected, misshapen)
    if missing:
        raise MissingTensor(checkpoint.folder, missing[0], checkpoint.names)
    return stored


def _in_head(name: str, module: PreTrainedModel) -> bool:
    """Return whether a tensor belongs to a head or pooler, not to the tower below it."""
    if "pooler" in name.split("."):
        return True
    prefix, own = f"{module.base_model_prefix}.", module.state_dict().keys()
    has_head = any(each.startswith(prefix) for each in own)
    return not name.startswith(prefix) and (name not in own or has_head)


def _matches(
    module: PreTrainedModel, checkpoint: LazyCheckpoint, state: dict[str, Tensor]
) -> list[StoredTensor]:
    """Return every tensor of the checkpoint under the model's name for it, known or not."""
    transforms = get_model_conversion_mapping(module)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    plain: list[StoredTensor] = []
    conversions: dict[str, Conversion] = {}
    prefix = module.base_model_prefix
    # parts that are joined are joined in this order
    for source in sorted(checkpoint.names, key=dot_natural_key):
        name, pattern = rename_source_key(source, renamings, converters, prefix, state)
        if name not in state and source in state:  # a present name that looks like an old one
            name, pattern = rename_source_key(source, [], [], prefix, state)
        if pattern is None:
            plain.append(StoredTensor(name, (source,), checkpoint.shape(source)))
        else:
            conversion = Conversion(by_pattern[pattern], name, module)
            conversions.setdefault(name, conversion).sources.append((source, pattern))
    return plain + [one for each in conversions.values() for one in _converted(checkpoint, each)]


def _converted(checkpoint: LazyCheckpoint, conversion: Conversion) -> list[StoredTensor]:
    """Return what a conversion makes, from a conversion of meta tensors. Raises: BadFile."""
    sources = tuple(source for source, _ in conversion.sources)
    try:
        made = conversion.apply(lambda name: torch.empty(checkpoint.shape(name), device="meta"))
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        problem = f"{sources[0]} and its other parts make no {conversion.first} ({reason})"
        way_out = "write the model again with save_pretrained(folder)"
        raise BadFile(checkpoint.file_of(sources[0]), problem, way_out) from None
    return [StoredTensor(n, sources, tuple(t.shape), conversion) for n, t in made.items()]


def tied_names(module: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of each parameter; several if it is tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(group) for group in names.values()]


def _untie_different(module: nn.Module, stored: Mapping[str, StoredTensor], read: Read) -> None:
    """Untie names under which the checkpoint stores different values, as from_pretrained does."""
    for names in tied_names(module):
        first, *others = [name for name in names if name in stored] or [""]
        for name in others:
            if not torch.equal(stored[first].read(read), stored[name].read(read)):
                own = nn.Parameter(module.get_parameter(name).detach().clone())
                _set_parameter(module, name, own)


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    module.get_submodule(owner)._parameters[attribute] = parameter


class Parameters:
    """The parameters of a skeleton, each under the first of its names, loaded and dropped by name.

    Buffers that the checkpoint holds are loaded at once.

    Args:
        module: the skeleton.
        checkpoint: its tensors.
        device: where loaded tensors go.
        ledger: counts the bytes of loaded parameters.
        override: by name a tensor to load instead of the stored one, or None.
        heads: as in stored_tensors; a head that is missing cannot compute.

    Raises:
        What stored_tensors raises.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        checkpoint: LazyCheckpoint,
        device: torch.device,
        ledger: Ledger,
        override: Override,
        heads: bool = False,
    ):
        self._module, self._checkpoint, self._device = module, checkpoint, device
        self._ledger, self._override = ledger, override
        stored = stored_tensors(module, checkpoint, heads)
        _untie_different(module, stored, checkpoint.tensor)
        self._names = {names[0]: names for names in tied_names(module)}
        self._meta = {name: module.get_parameter(name) for name in self._names}
        first = {id(parameter): name for name, parameter in self._meta.items()}
        self._own = {
            part: [first[id(p)] for p in part._parameters.values() if p is not None]
            for part in module.modules()
        }
        self._stored: dict[str, StoredTensor] = {}
        for name, names in self._names.items():
            each = next((stored[n] for n in names if n in stored), None)
            if each is not None:  # a head's may be missing
                self._stored[name] = each
        parameters = {n for names in self._names.values() for n in names}
        buffers = {name: each for name, each in stored.items() if name not in parameters}
        self._stored |= buffers
        self._loaded: set[str] = set()
        for name in buffers:
            module.get_buffer(name).copy_(self.stored(name))

    @property
    def names(self) -> list[str]:
        """Return the names of everything a checkpoint of this model holds, a tied tensor once."""
        again = {name for names in self._names.values() for name in names[1:]}
        return [name for name in self._module.state_dict() if name not in again]

    @property
    def first(self) -> str:
        """Return the name of the model's first parameter."""
        return next(iter(self._meta))

    def stored(self, name: str) -> Tensor:
        """Return one of `names` in the dtype of its file, on the CPU."""
        stored = self._stored.get(name)
        if stored is None:  # a buffer that files leave to the model
            return self._module.get_buffer(name).cpu()
        return stored.read(self._checkpoint.tensor)

    def stored_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of one of `names` in its file."""
        stored = self._stored.get(name)
        if stored is None:
            return self._module.get_buffer(name).dtype
        return self._checkpoint.dtype(stored.sources[0])

    def sources(self, name: str) -> list[str]:
        """Return the names in files of the tensors that one of `names` is made of."""
        return [self._checkpoint.stored_name(source) for source in self._stored[name].sources]

    def to_sources(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return a new value of one of `names` as files hold it, e.g. one tensor per expert.

        It stays whole if its sources' rows cannot be told apart.
        """
        parts = self._stored[name].to_sources(tensor, self._checkpoint.shape)
        named = {self._checkpoint.stored_name(source): part for source, part in parts.items()}
        return named or {name: tensor}

    def own(self, module: nn.Module) -> list[str]:
        """Return the parameters of a module without those of its parts."""
        return self._own[module]

    def below(self, module: nn.Module) -> list[str]:
        """Return the parameters of a module and of all its parts."""
        return list(dict.fromkeys(name for part in module.modules() for name in self._own[part]))

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Return the stored bytes of those that are stored and not loaded."""
        return {
            name: prod(self._stored[name].shape) * self.stored_dtype(name).itemsize
            for name in names
            if name not in self._loaded and name in self._stored
        }

    def load(
        self,
        names: Iterable[str],
        loaded: list[str],
        prefetched: dict[str, Tensor] | None = None,
    ) -> None:
        """Load missing parameters, using prefetched tensors if given; append each to `loaded`."""
        for name in names:
            if name in self._loaded:
                continue
            tensor = prefetched.pop(name, None) if prefetched else None
            if tensor is None:
                tensor = self._override(name)
            if tensor is None:
                tensor = self.stored(name)
            meta = self._meta[name]
            tensor = tensor.to(self._device, non_blocking=True).to(meta.dtype)
            # some modules compute differently without gradients
            self._put(name, nn.Parameter(tensor, meta.requires_grad))
            self._loaded.add(name)
            self._ledger.add(tensor.nbytes)
            loaded.append(name)

    def drop(self, names: Iterable[str]) -> None:
        """Unload loaded parameters."""
        for name in names:
            self._put(name, self._meta[name])
            self._loaded.remove(name)
            self._ledger.remove(self._meta[name].nbytes)

    def _put(self, name: str, parameter: nn.Parameter) -> None:
        for each in self._names[name]:
            _set_parameter(self._module, each, parameter)
