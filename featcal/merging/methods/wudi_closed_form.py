"""WUDI at the minimum of its loss."""

from pydantic import PositiveFloat

from featcal.merging.methods.wudi import wudi
from featcal.merging.registry import MergeJob, NamedTensors, method
from featcal.merging.sources import VOCABULARY


@method(source="Cheng et al., 2025, at the minimum of its loss")
def wudi_closed_form(
    job: MergeJob, exclude: tuple[str, ...] = VOCABULARY, rtol: PositiveFloat | None = None
) -> NamedTensors:
    """Yield every tensor by WUDI's closed form; exclude and rtol as for wudi."""
    yield from wudi(job, "closed_form", exclude=exclude, rtol=rtol)
