"""WUDI at the minimum of its loss."""

from collections.abc import Iterator

from pydantic import PositiveFloat

from featcal.merging.methods.wudi import wudi
from featcal.merging.registry import MergeJob, NamedTensor, method
from featcal.merging.sources import VOCABULARY


@method("wudi_closed_form", source="Cheng et al., 2025, at the minimum of its loss")
def wudi_closed_form(
    job: MergeJob, exclude: tuple[str, ...] = VOCABULARY, rtol: PositiveFloat | None = None
) -> Iterator[NamedTensor]:
    """Yield every tensor by WUDI's closed form; exclude and rtol as for wudi."""
    yield from wudi(job, "closed_form", exclude=exclude, rtol=rtol)
