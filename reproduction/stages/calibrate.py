"""Stage `calibrate`: FeatCal on merged models of images, once per setting and seed of the calibration draw.

Of language models: calibrate_language.py.
"""

from pathlib import Path
from typing import Any

from reproduction.experiments.runs import CalibrateRun, Draw
from reproduction.stages.calibrations import calibrate_all, calibrated
from reproduction.stages.context import Context, load_context, runs_of


def run(key: str) -> None:
    """Write outputs/<suite>/calibrated/<merged>-<setting>/seed<NN>/ for a role and pool, or for one merged model of them."""
    context = load_context()
    calibrate_all(context, key, runs_of("calibrate", context.experiments.calibrate, key), calibrate_one)


def calibrate_one(context: Context, name: str, run: CalibrateRun, seed: int, out: Path) -> dict[str, Any]:
    """One calibrated model: draw n training images per task, calibrate, write the folder `out`; what that cost."""
    from reproduction.stages.streams import streams

    draw = Draw("train", run.samples, run.batch, seed)
    return calibrated(context, name, run, streams(context, run.role, run.pool, draw), out)
