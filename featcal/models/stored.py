"""Where each tensor of a model lies in its checkpoint, by the names and conversions transformers
itself applies when it loads.

Everything is decided from headers, before anything is read; what is tied, missing, surplus or
misshapen is known from here on."""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Stored:
    """One tensor of the model, as it lies in the checkpoint or to be made of several that lie
    there.
    """

    name: str
    sources: tuple[
        tuple[str, str], ...
    ]  # name in the checkpoint, pattern of the conversion it matched
    shape: tuple[int, ...]
    conversion: "Conversion | None" = None

    def read(self, read: Read) -> Tensor:
        """The tensor in memory of its own, each source read by `read`."""
        if self.conversion is None:
            return read(self.sources[0][0])
        return self.conversion.apply(self.sources, read)[
            self.name
        ].clone()  # several may be views of one source

    def apart(
        self, tensor: Tensor, shape_of: Callable[[str], tuple[int, ...]]
    ) -> dict[str, Tensor]:
        """What `read` makes this tensor of, by source; nothing where it is not made of whole rows
        of its sources.

        Which row comes from which source is seen from a conversion of tensors that hold their
        source's number.
        """
        names = [source for source, _ in self.sources]
        if len(names) == 1:
            return {names[0]: tensor}
        assert self.conversion is not None
        marks = {
            name: torch.full((*shape_of(name)[:-1], 1), number) for number, name in enumerate(names)
        }
        made = self.conversion.apply(self.sources, marks.__getitem__)[self.name]
        if made.shape != (*self.shape[:-1], 1):
            return {}
        return {
            name: tensor[made[..., 0] == number].reshape(shape_of(name))
            for number, name in enumerate(names)
        }


@dataclass(frozen=True)
class Conversion:
    """Transformers' own way from tensors of a file to tensors of a model, such as one matrix cut
    into two.
    """

    converter: WeightConverter
    first: str  # of the names it makes
    module: PreTrainedModel

    def apply(self, sources: tuple[tuple[str, str], ...], read: Read) -> dict[str, Tensor]:
        converter = deepcopy(self.converter)  # it collects what it is given
        for source, pattern in sources:
            converter.add_tensor(self.first, source, pattern, read(source))  # type: ignore[arg-type]
        made = converter.convert(self.first, model=self.module, config=self.module.config)
        return {
            name: values[0] if isinstance(values, list) else values for name, values in made.items()
        }


def stored_tensors(
    module: PreTrainedModel, checkpoint: LazyCheckpoint, heads: bool = False
) -> dict[str, Stored]:
    """Every tensor of the model's state that the checkpoint holds, by name; of tied parameters
    those names that it holds.

    heads: the checkpoint is that of a model with another head, or with one more or less: what
    stands on the tower may be missing or left over.
    Raises: WrongKeys for tensors of the checkpoint that belong to nothing or have another shape;
    MissingTensor with the three nearest names for a parameter it holds under none of its names;
    BadFile where a conversion is impossible.
    """
    state: dict[str, Tensor] = module.state_dict()
    found: dict[str, Stored] = {}
    surplus = []
    for stored in matches(module, checkpoint, state):
        if stored.name in state and stored.name not in found:
            found[stored.name] = stored
        else:
            surplus.append(stored)
    misshapen = sorted(name for name in found if found[name].shape != tuple(state[name].shape))
    keys: Any = SimpleNamespace(
        missing_keys=set(state) - set(found), unexpected_keys={stored.name for stored in surplus}
    )
    module._adjust_missing_and_unexpected_keys(
        keys
    )  # drops what old files hold although every model builds it itself
    unexpected = sorted(
        stored.sources[0][0] for stored in surplus if stored.name in keys.unexpected_keys
    )
    ties = tied_names(module)
    missing = [names[0] for names in ties if found.keys().isdisjoint(names)]
    missing += sorted(
        set(keys.missing_keys).difference(*ties)
    )  # of buffers; a parameter can never be left out
    if heads:
        missing = [name for name in missing if not on_tower(name, module)]
        unexpected = [name for name in unexpected if not on_tower(name, module)]
    if unexpected or misshapen:
        raise WrongKeys(checkpoint.folder, type(module).__name__, missing, unexpected, misshapen)
    if missing:
        raise MissingTensor(checkpoint.folder, missing[0], checkpoint.names)
    return found


def on_tower(name: str, module: PreTrainedModel) -> bool:
    """Whether a tensor is no part of the tower: named beside it where one of the two has a head, or
    a pooler's.
    """
    prefix = f"{module.base_model_prefix}."
    inside = module.state_dict().keys()
    if "pooler" in name.split("."):
        return True
    return not name.startswith(prefix) and (
        name not in inside or any(each.startswith(prefix) for each in inside)
    )


def matches(
    module: PreTrainedModel, checkpoint: LazyCheckpoint, state: dict[str, Tensor]
) -> list[Stored]:
    """Every tensor of the checkpoint under the model's name for it, whether the model has it or
    not.
    """
    transforms = get_model_conversion_mapping(module)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    found: list[Stored] = []
    together: dict[str, tuple[Conversion, list[tuple[str, str]]]] = {}
    for source in sorted(
        checkpoint.names, key=dot_natural_key
    ):  # parts that are joined are joined in this order
        name, pattern = rename_source_key(
            source, renamings, converters, module.base_model_prefix, state
        )
        if name not in state and source in state:  # a present name that looks like an old one
            name, pattern = rename_source_key(source, [], [], module.base_model_prefix, state)
        if pattern is None:
            found.append(Stored(name, ((source, ""),), checkpoint.shape(source)))
        else:
            conversion = Conversion(by_pattern[pattern], name, module)
            together.setdefault(name, (conversion, []))[1].append((source, pattern))
    return found + [
        stored for group in together.values() for stored in converted(checkpoint, *group)
    ]


def converted(
    checkpoint: LazyCheckpoint, conversion: Conversion, sources: list[tuple[str, str]]
) -> list[Stored]:
    """What a conversion makes, found by converting tensors without numbers. Raises: BadFile."""
    try:
        made = conversion.apply(
            tuple(sources), lambda name: torch.empty(checkpoint.shape(name), device="meta")
        )
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        problem = f"{sources[0][0]} and what belongs to it make no {conversion.first} ({' '.join(str(error).split())})"
        raise BadFile(
            checkpoint.file_of(sources[0][0]),
            problem,
            "write the model again with save_pretrained(folder)",
        ) from None
    return [
        Stored(name, tuple(sources), tuple(tensor.shape), conversion)
        for name, tensor in made.items()
    ]


def tied_names(module: nn.Module) -> list[tuple[str, ...]]:
    """The names of each parameter; several where it is tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(group) for group in names.values()]


def untie_different(module: nn.Module, found: Mapping[str, Stored], read: Read) -> None:
    """Parts names that config.json ties although the checkpoint holds different numbers under them,
    as from_pretrained does.
    """
    for names in tied_names(module):
        first, *others = [name for name in names if name in found] or [
            ""
        ]  # none of a head that is missing
        for name in others:
            here, there = found[first].read(read), found[name].read(read)
            if not torch.equal(here, there):
                owner, _, attribute = name.rpartition(".")
                own = nn.Parameter(module.get_parameter(name).detach().clone())
                module.get_submodule(owner)._parameters[attribute] = own


Instead = Callable[[str], Tensor | None]


def nothing(name: str) -> None:
    """Every parameter as it is stored."""


class Parameters:
    """The parameters of a skeleton, each under the first of its names; buffers that the checkpoint
    holds are loaded at once.

    names:  of everything a checkpoint of this model holds, a tied parameter once.
    ledger: counts the bytes of what is loaded.
    instead: by name what is loaded in the place of what is stored; None where that is.
    heads:  of the checkpoint's head and the module's one may lack what the other has; it can then
            not compute.
    Raises: what stored_tensors raises.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        checkpoint: LazyCheckpoint,
        device: torch.device,
        ledger: Ledger,
        instead: Instead = nothing,
        heads: bool = False,
    ):
        self._module, self._checkpoint, self._device, self._ledger = (
            module,
            checkpoint,
            device,
            ledger,
        )
        self._instead = instead
        found = stored_tensors(module, checkpoint, heads)
        untie_different(module, found, checkpoint.tensor)
        self._places = {names[0]: names for names in tied_names(module)}
        self._meta = {name: module.get_parameter(name) for name in self._places}
        first = {id(parameter): name for name, parameter in self._meta.items()}
        self._own = {
            m: [first[id(p)] for p in m._parameters.values() if p is not None]
            for m in module.modules()
        }
        there = {
            name: next((found[n] for n in places if n in found), None)
            for name, places in self._places.items()
        }
        self._stored = {
            name: stored for name, stored in there.items() if stored is not None
        }  # a head may be missing
        buffers = {
            name: stored
            for name, stored in found.items()
            if name not in {n for p in self._places.values() for n in p}
        }
        self._stored |= buffers
        self._there: set[str] = set()
        for name in buffers:
            module.get_buffer(name).copy_(self.stored(name))

    @property
    def names(self) -> list[str]:
        again = {name for places in self._places.values() for name in places[1:]}
        return [name for name in self._module.state_dict() if name not in again]

    @property
    def first(self) -> str:
        """The parameter that `next(model.parameters())` gives."""
        return next(iter(self._meta))

    def stored(self, name: str) -> Tensor:
        """One of `names` as the file holds it, in its dtype, on the CPU."""
        stored = self._stored.get(name)
        return (
            stored.read(self._checkpoint.tensor) if stored else self._module.get_buffer(name).cpu()
        )

    def sources(self, name: str) -> list[str]:
        """What the files call the tensors that one of `names` is made of; one alone, unless
        transformers joins or cuts them.
        """
        return [self._checkpoint.stored_name(source) for source, _ in self._stored[name].sources]

    def apart(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """A tensor for one of `names` as the files hold it, by what they call it: a tensor for each
        expert, say; else whole.
        """
        parts = self._stored[name].apart(tensor, self._checkpoint.shape)
        return (
            {self._checkpoint.stored_name(source): part for source, part in parts.items()}
            if parts
            else {name: tensor}
        )

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype in the file of one of `names`; the model's own where the file leaves a buffer
        to the model.
        """
        stored = self._stored.get(name)
        return (
            self._checkpoint.dtype(stored.sources[0][0])
            if stored
            else self._module.get_buffer(name).dtype
        )

    def own(self, module: nn.Module) -> list[str]:
        """The parameters a module has itself."""
        return self._own[module]

    def below(self, module: nn.Module) -> list[str]:
        """The parameters of a module and of all its parts."""
        return list(dict.fromkeys(name for part in module.modules() for name in self._own[part]))

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Bytes, as stored, of those that are not loaded."""
        absent = [name for name in names if name not in self._there and name in self._stored]
        return {
            name: prod(self._stored[name].shape) * self.stored_dtype(name).itemsize
            for name in absent
        }

    def load(
        self, names: Iterable[str], loaded: list[str], ahead: dict[str, Tensor] | None = None
    ) -> None:
        """Puts those in that are not there yet, from `ahead` where it has them; adds each to
        `loaded` once it is there.
        """
        for name in names:
            if name not in self._there:
                tensor = ahead.pop(name) if ahead and name in ahead else self._instead(name)
                tensor = self.stored(name) if tensor is None else tensor
                meta = self._meta[name]
                tensor = tensor.to(self._device, non_blocking=True).to(meta.dtype)
                self._put(
                    name, nn.Parameter(tensor, meta.requires_grad)
                )  # some modules compute otherwise without gradients
                self._there.add(name)
                self._ledger.add(tensor.nbytes)
                loaded.append(name)

    def drop(self, names: Iterable[str]) -> None:
        """Takes loaded ones out again."""
        for name in names:
            self._put(name, self._meta[name])
            self._there.remove(name)
            self._ledger.remove(self._meta[name].nbytes)

    def _put(self, name: str, parameter: nn.Parameter) -> None:
        for place in self._places[name]:
            owner, _, attribute = place.rpartition(".")
            self._module.get_submodule(owner)._parameters[attribute] = parameter
