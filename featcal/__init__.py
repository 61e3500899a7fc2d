"""FeatCal: calibrate a merged model's weights to its experts' features, block by block, in closed
form.

The names below are loaded on first use, so that reading a report needs no torch.
"""

from importlib import import_module
from typing import Any

from featcal.version import __version__ as __version__

_HOMES = {
    "BlockPlan": "featcal.models.plan",
    "Calibration": "featcal.settings",
    "Stack": "featcal.models.plan",
    "calibrate": "featcal.calibration.calibrate",
    "compare": "featcal.evaluation.compare",
    "load_batches": "featcal.data.batches",
    "mean_shift": "featcal.baselines.mean_shift",
    "merge": "featcal.merging.merge",
    "prob_surgery": "featcal.baselines.prob_surgery",
    "surgery": "featcal.baselines.surgery",
    "tune": "featcal.tuning.tune",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'featcal' has no attribute {name!r}")
    globals()[name] = getattr(import_module(_HOMES[name]), name)  # asked for once
    return globals()[name]
