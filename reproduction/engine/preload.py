"""Imports that Python's fork server makes once, so that every worker starts with them.

Collecting garbage among half a million new objects would take a seventh of the time; frozen ones
are never looked at again, so workers share their memory.
"""

import gc
from importlib import import_module

gc.disable()
for name in (
    "featcal.baselines.training", "featcal.calibration.calibrate", "featcal.models.load",
    "reproduction.prepare.sources", "safetensors.torch", "transformers.models.clip.modeling_clip",
):  # fmt: skip
    import_module(name)
gc.freeze()
gc.enable()
