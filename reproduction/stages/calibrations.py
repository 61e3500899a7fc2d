"""Calibrations of merged models, once per setting and seed, next to each other in the workers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from reproduction.experiments.runs import CalibrateRun
from reproduction.stages.context import Context, not_run, recorded
from reproduction.stages.workers import fan_out, tell


def calibrate_all(context: Context, key: str, runs: Mapping[str, CalibrateRun], one: Callable[..., Any]) -> None:
    """Write outputs/<suite>/calibrated/<name>/seed<NN>/ for every run; empty folders where the suite does not run it.

    one: calibrates one model and tells what that cost.
    """
    with recorded(context, "calibrate", key) as record:
        jobs = {}
        for name, run in runs.items():
            if run.calibration is None or not context.plays(run.role, run.pool):
                not_run(context, f"calibrate {name}", context.layout.calibrated(name, 0).parent)
                continue
            for seed in run.seeds:
                told = f"{name} seed {seed}"
                jobs[told] = (context, told, run, seed, context.layout.calibrated(name, seed))
        costs: dict[str, dict[str, Any]] = {}
        for told, cost in sorted(fan_out(f"calibrate {key}", one, jobs, context.suite.workers)):
            name, _, drawn = told.partition(" ")
            costs.setdefault(f"calibrate@{name}", {})[drawn] = cost
        record["cost"] = costs


def calibrated(
    context: Context, name: str, run: CalibrateRun, batches: Mapping[str, Iterable[Any]], out: Path, plan: Any = None
) -> dict[str, Any]:
    """One calibrated model as the folder `out`; what that cost."""
    import featcal
    from featcal.models.device import torch_device

    layout = context.layout
    assert run.calibration is not None
    result = featcal.calibrate(
        layout.merged(run.merged),
        base=layout.base(run.role, run.pool),
        experts={task: layout.expert(run.role, run.pool, task) for task in batches},
        batches=batches,
        settings=run.calibration,
        plan=plan,
        device=torch_device(context.suite.device),
        out=out,
        work=layout.unfinished(f"calibrate-{name}".replace(" ", "-")),
        progress=partial(tell, name),
    )
    return asdict(result.cost)
