"""One merge as its method sees it: models by tensor, settings, data, and where progress and records
go.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from featcal.merging.sources import Source

Named = tuple[str, Tensor]
Batches = Mapping[str, Iterable[Mapping[str, Any]]]  # by task


def silent(line: str) -> None:
    """Progress that nobody watches."""


@dataclass
class Job:
    """What a method is given; it yields every tensor of `names` once, in any order."""

    base: Source
    experts: dict[
        str, Source
    ]  # by task, sorted, so that no result depends on the order they were given in
    settings: Any  # of the method's own class
    structure: Callable[[], nn.Module]  # a module like the base, nobody else's, to run and to fill
    batches: Batches = field(default_factory=dict)
    head: Mapping[str, Tensor] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    progress: Callable[[str], None] = silent
    at_once: int = 1  # batches that are answered at the same time
    record: dict[str, Any] = field(
        default_factory=dict
    )  # what was found out while merging, for merge.json

    @property
    def names(self) -> list[str]:
        """The tensors to merge: those of numbers; counters are not merged."""
        return [name for name in self.base.names if self.base.dtype(name).is_floating_point]

    def read(self, name: str) -> tuple[Tensor, list[Tensor]]:
        """One tensor of the base and of every expert, on the device."""
        theirs = [expert.finite_tensor(name).to(self.device) for expert in self.experts.values()]
        return self.base.finite_tensor(name).to(self.device), theirs


def tensor_by_tensor(
    job: Job, names: list[str], merged: Callable[[Tensor, list[Tensor]], Tensor]
) -> Iterator[Named]:
    """Every named tensor by a function of the base's and the experts'; of each model one is in
    memory.
    """
    for name in names:
        yield name, merged(*job.read(name))
