"""The normal equations of one block, as tasks add to them and ranks send them."""

from dataclasses import dataclass, field

from featcal.calibration.sites import Site
from featcal.core.kernel import KernelSystem
from featcal.core.norm import NormSystem
from featcal.core.ridge import RidgeSystem


@dataclass
class Systems:
    """The systems of one block, summed over the tasks added so far."""

    sites: dict[Site, RidgeSystem | KernelSystem] = field(default_factory=dict)
    norms: dict[str, NormSystem] = field(default_factory=dict)
