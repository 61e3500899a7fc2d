"""FeatCal: calibrate a merged model's weights to its experts' features, block by block, in closed
form.

The names below are loaded on first use, so that reading a report needs no torch.
"""

from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any

from featcal import torchvision_mend
from featcal.version import __version__

torchvision_mend.install()

_HOMES = {
    "calibrate": "featcal.calibration.calibrate",
    "compare": "featcal.evaluation.compare",
    "load_batches": "featcal.data.calibration",
    "merge": "featcal.merging.merge",
    "tune": "featcal.tuning.tune",
    "surgery": "featcal.rivals.surgery",
    "svc": "featcal.merging.svc",
    "prodistill": "featcal.merging.prodistill",
    "surgery_v2": "featcal.rivals.surgery_v2",
    "interv_merge": "featcal.rivals.interv_merge",
    "prob_surgery": "featcal.rivals.prob_surgery",
    "mean_shift": "featcal.rivals.mean_shift",
    "Calibration": "featcal.settings",
    "BlockPlan": "featcal.blocks.plan",
    "Stack": "featcal.blocks.plan",
}
__all__ = [
    "BlockPlan",
    "Calibration",
    "Stack",
    "__version__",
    "calibrate",
    "compare",
    "interv_merge",
    "mean_shift",
    "load_batches",
    "merge",
    "prob_surgery",
    "prodistill",
    "surgery",
    "surgery_v2",
    "svc",
    "tune",
]

if TYPE_CHECKING:
    from featcal.blocks.plan import BlockPlan, Stack
    from featcal.calibration.calibrate import calibrate
    from featcal.data.calibration import load_batches
    from featcal.evaluation.compare import compare
    from featcal.merging.merge import merge
    from featcal.merging.prodistill import prodistill
    from featcal.merging.svc import svc
    from featcal.rivals.interv_merge import interv_merge
    from featcal.rivals.mean_shift import mean_shift
    from featcal.rivals.prob_surgery import prob_surgery
    from featcal.rivals.surgery import surgery
    from featcal.rivals.surgery_v2 import surgery_v2
    from featcal.settings import Calibration
    from featcal.tuning.tune import tune


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'featcal' has no attribute {name!r}")
    found = getattr(import_module(_HOMES[name]), name)
    if isinstance(found, FunctionType):
        from featcal.arguments import checked

        found = checked(found)
    globals()[name] = found  # so that it is one object
    return found
