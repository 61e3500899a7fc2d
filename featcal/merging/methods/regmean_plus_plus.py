"""RegMean++: RegMean on the features of the merge so far, carried forward block by block."""

from featcal.merging.methods.regmean import regression_mean
from featcal.merging.registry import MergeJob, NamedTensors, method
from featcal.settings import Fraction


@method(source="Nguyen et al., 2025", needs=("batches",))
def regmean_plus_plus(job: MergeJob, off_diagonal: Fraction | None = None) -> NamedTensors:
    """Yield every tensor by RegMean++; tensors after the last block stay the base's.

    off_diagonal: as for regmean.
    """
    yield from regression_mean(job, off_diagonal, own=False)
