"""Stage `calibrate`: FeatCal on one merged model of images, once per setting and seed of the calibration draw."""

from pathlib import Path
from typing import Any

from featcal.errors import UnknownKey
from featcal.runs import CalibrateRun, Draw
from featcal.stages.calibrations import calibrate_all, calibrated
from featcal.stages.context import Context, load_context


def run(key: str) -> None:
    """For `clip_b32-8-wudi`: the entries of `calibrate` that start from this merged model, as calibrate_all writes them."""
    context = load_context()
    runs = {name: run for name, run in context.experiments.calibrate.items() if run.merged == key}
    if not runs:
        raise UnknownKey("calibrate", key, sorted({run.merged for run in context.experiments.calibrate.values()}))
    calibrate_all(context, "calibrate", key, runs, calibrate_one)


def calibrate_one(context: Context, name: str, run: CalibrateRun, seed: int, out: Path) -> dict[str, Any]:
    """One calibrated model: draw n training images per task, calibrate, write the folder `out`; what that cost."""
    from featcal.stages.streams import streams

    draw = Draw("train", run.samples, run.batch, seed)
    return calibrated(context, name, run, streams(context, run.role, run.pool, draw), out)
