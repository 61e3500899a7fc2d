"""FeatCal: calibrate a merged model in closed form to its experts' features, block by block.

The names below are loaded on first use, so importing this package loads no torch.
"""

__version__ = "0.1.0"

_MODULES = {
    "BlockPlan": "featcal.models.plan",
    "Calibration": "featcal.settings",
    "Stack": "featcal.models.plan",
    "calibrate": "featcal.calibration.calibrate",
    "compare": "featcal.evaluation.compare",
    "load_batches": "featcal.data.batches",
    "mean_shift": "featcal.baselines.corrections",
    "merge": "featcal.merging.merge",
    "prob_surgery": "featcal.baselines.corrections",
    "surgery": "featcal.baselines.corrections",
}
__all__ = [*_MODULES]


def __getattr__(name: str):  # of any type: importing Any delays Ctrl-C
    if name not in _MODULES:
        raise AttributeError(f"module 'featcal' has no attribute {name!r}")
    from importlib import import_module

    globals()[name] = getattr(import_module(_MODULES[name]), name)
    return globals()[name]
