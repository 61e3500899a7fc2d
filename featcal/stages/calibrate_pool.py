"""Stage `calibrate_pool`: FeatCal on the merged models of a larger pool, next to each other."""

from featcal.stages.calibrate import calibrate_one
from featcal.stages.calibrations import calibrate_all
from featcal.stages.context import load_context, pick


def run(key: str) -> None:
    """Write outputs/<suite>/calibrated/<key>-<merger>-<setting>/seed<NN>/; empty folders where it is not run."""
    context = load_context()
    runs = pick("pools", context.experiments.pools, key).calibrate
    calibrate_all(context, "calibrate_pool", key, runs, calibrate_one)
