"""Parameters of a model that are in memory by name: on meta until they are loaded from the
checkpoint, and again once dropped.

Knows nothing of when a parameter is needed.
"""

from collections.abc import Callable, Iterable
from math import prod

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from featcal.models.stored import stored_tensors, tied_names, untie_different
from featcal.storage.checkpoint import LazyCheckpoint
from featcal.storage.ledger import Ledger

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
