"""A merged model, its base and its experts, opened together by what repairs the merged model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from featcal.merging.adapters import expert_sources, named_experts
from featcal.merging.embeddings import kept_embeddings
from featcal.merging.job import Named
from featcal.merging.merge import Model, matching_part, merge_target, module_like
from featcal.merging.sources import Source, require_alike, source
from featcal.merging.stream import fill, size_of, write_merged
from featcal.merging.towers import aligned


@dataclass(frozen=True)
class Repair:
    """The three as sources, and what a module or folder like the base is made from."""

    merged: Source
    base: Source
    experts: dict[
        str, Source
    ]  # by task, sorted; with the base's rows of words and without heads of their own
    apart: frozenset[
        str
    ]  # tensors that not all experts have in the base's shape, which stay the merged model's
    like: Any
    part: str | None

    def module(self) -> nn.Module:
        """A module like the base that is nobody else's."""
        return module_like(self.like, self.part)

    def result(self, tensors: Iterator[Named], out: str | Path | None) -> nn.Module | Path:
        """A module with these tensors, or the folder they are written to."""
        if out is None:
            return fill(self.module(), tensors)
        return write_merged(
            tensors, out, merge_target(self.like, self.part, size_of(self.base)), {}
        )


def opened(
    place: str, merged: Model, base: Model, experts: Mapping[str, Model] | Sequence[Model]
) -> Repair:
    """Modules or checkpoint folders as sources that fit. Raises: BadSetting; MissingTensor,
    TensorsDiffer.
    """
    named = named_experts(experts, place)
    like, part = matching_part(base, named)
    origin = source(like, "base", part)
    ours, ends = (
        source(merged, "merged"),
        aligned(origin, expert_sources(named, origin), like, named),
    )
    _, shared, theirs = kept_embeddings(origin, ends.experts, False, ends.apart)
    require_alike(shared, theirs)
    require_alike(origin, {"merged": ours})
    return Repair(ours, origin, theirs, ends.apart, like, part)
