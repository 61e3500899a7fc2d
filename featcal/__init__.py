"""FeatCal: calibrate a merged model's weights to its experts' features, block by block, in closed form.

The names below are loaded on first use, so that reading a report needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from featcal import torchvision_mend

torchvision_mend.install()

__version__ = "0.1.0"

_HOMES = {
    "calibrate": "featcal.calibration.calibrate",
    "merge": "featcal.merging.merge",
    "tune": "featcal.tuning.tune",
    "surgery": "featcal.baselines.surgery",
    "prob_surgery": "featcal.baselines.prob_surgery",
    "mean_shift": "featcal.baselines.mean_shift",
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
    "mean_shift",
    "merge",
    "prob_surgery",
    "surgery",
    "tune",
]

if TYPE_CHECKING:
    from featcal.baselines.mean_shift import mean_shift
    from featcal.baselines.prob_surgery import prob_surgery
    from featcal.baselines.surgery import surgery
    from featcal.blocks.plan import BlockPlan, Stack
    from featcal.calibration.calibrate import calibrate
    from featcal.merging.merge import merge
    from featcal.settings import Calibration
    from featcal.tuning.tune import tune


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'featcal' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
