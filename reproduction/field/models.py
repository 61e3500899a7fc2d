"""A merged model, its base and its experts, read tensor by tensor by SVC and ProDistill."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from featcal.merging.align import require_alike
from featcal.merging.merge import fill, matching_part, module_like, write_merged
from featcal.merging.registry import NamedTensors
from featcal.merging.sources import Source, source
from featcal.models.batch import Model


@dataclass(frozen=True)
class Models:
    """The models as sources.   like, part: what a result of the base's form is made from."""

    merged: Source
    base: Source
    experts: dict[str, Source]  # by task, sorted
    like: Any
    part: str | None

    @classmethod
    def opened(cls, merged: Model, base: Model, experts: Mapping[str, Model]) -> "Models":
        """Open modules or checkpoint folders. Raises: MissingTensor, TensorsDiffer."""
        like, part = matching_part(base, experts)
        origin, ours = source(like, "base", part), source(merged, "merged")
        theirs = {task: source(experts[task], f"expert {task!r}") for task in sorted(experts)}
        require_alike(origin, {**theirs, "merged": ours})
        return cls(ours, origin, theirs, like, part)

    def module(self) -> nn.Module:
        """Return a new module of the base's form."""
        return module_like(self.like, self.part)

    def result(self, tensors: NamedTensors, out: Path | None) -> nn.Module | Path:
        """Return a module with these tensors, or write them to the folder `out`."""
        if out is None:
            return fill(self.module(), tensors)
        return write_merged(tensors, out, self.like, self.part, self.base)
