"""How much a calibration has to do, and with what: what is planned for."""

from dataclasses import dataclass

from featcal.blocks.batches import PROVING
from featcal.settings import Calibration


@dataclass(frozen=True)
class Workload:
    """How much a run has to do, and with what."""

    tasks: int
    samples: int  # of each task
    batch: int  # samples in memory at a time
    on_gpu: bool = False
    device_budget: int = 0  # bytes of features that may wait on the GPU
    host_budget: int | None = None  # … and in the host's memory; None is as much as it takes
    ranks: int = 1  # processes that share the tasks
    drawn: int = 0  # bytes of samples that the caller keeps beside the run
    settings: Calibration = Calibration()

    @property
    def batches(self) -> dict[int, int]:
        """Sizes of one task's batches and how many there are of each, the first one first."""
        full, rest = divmod(self.samples, self.batch)
        return {size: count for size, count in ((self.batch, full), (rest, 1)) if size and count}

    @property
    def checked(self) -> int:
        """Samples on which the plan is checked."""
        return min(PROVING, next(iter(self.batches)))

    @property
    def tasks_here(self) -> int:
        """Tasks of the process that has most."""
        return -(-self.tasks // self.ranks)
