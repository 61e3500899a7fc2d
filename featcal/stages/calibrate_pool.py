"""Stage `calibrate_pool`: FeatCal on the four merged models of a larger pool, next to each other."""

from typing import Any

from featcal.stages.calibrate import calibrate_one
from featcal.stages.context import load_context, pick, recorded
from featcal.stages.workers import console, fan_out
from featcal.storage.atomic import atomic_folder


def run(key: str) -> None:
    """Write outputs/<suite>/calibrated/<key>-<merger>-<setting>/seed<NN>/; empty folders where it is not run."""
    context = load_context()
    pool, layout = pick("larger_pools", context.experiments.larger_pools, key), context.layout
    with recorded(context, "calibrate_pool", key) as record:
        jobs = {}
        for name, run in pool.calibrate.items():
            if run.calibration is None or not context.plays(pool.role, pool.pool):
                with atomic_folder(layout.calibrated(name, 0).parent):
                    console.print(f"calibrate_pool {name}: not run in suite {context.suite.name}")
            for seed in run.seeds if context.plays(pool.role, pool.pool) else ():
                told = f"{name} seed {seed}"
                jobs[told] = (context, told, run, seed, layout.calibrated(name, seed))
        costs: dict[str, dict[str, Any]] = {}
        for told, cost in sorted(fan_out(f"calibrate_pool {key}", calibrate_one, jobs, context.suite.workers)):
            name, _, drawn = told.partition(" ")
            costs.setdefault(f"calibrate@{name}", {})[drawn] = cost
        record["cost"] = costs
