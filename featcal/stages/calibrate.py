"""Stage `calibrate`: FeatCal on one merged model, once per setting and seed of the calibration draw."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from featcal.errors import UnknownKey
from featcal.runs import CalibrateRun
from featcal.stages.context import Context, load_context, recorded
from featcal.stages.workers import console, fan_out
from featcal.storage.atomic import atomic_folder


def run(key: str) -> None:
    """Write outputs/<suite>/calibrated/<key>-<setting>/seed<NN>/ for every setting and seed of one merged model."""
    context = load_context()
    runs = {name: run for name, run in context.experiments.calibrate.items() if run.merged == key}
    if not runs:
        raise UnknownKey("calibrate", key, sorted({run.merged for run in context.experiments.calibrate.values()}))
    calibrate_all(context, "calibrate", key, runs)


def calibrate_all(context: Context, verb: str, key: str, runs: Mapping[str, CalibrateRun]) -> None:
    """Calibrated models by name and seed, next to each other; empty folders where the suite does not run it."""
    with recorded(context, verb, key) as record:
        jobs = {}
        for name, run in runs.items():
            if run.calibration is None or not context.plays(run.role, run.pool):
                with atomic_folder(context.layout.calibrated(name, 0).parent):
                    console.print(f"{verb} {name}: not run in suite {context.suite.name}")
                continue
            for seed in run.seeds:
                told = f"{name} seed {seed}"
                jobs[told] = (context, told, run, seed, context.layout.calibrated(name, seed))
        costs: dict[str, dict[str, Any]] = {}
        for told, cost in sorted(fan_out(f"{verb} {key}", calibrate_one, jobs, context.suite.workers)):
            name, _, drawn = told.partition(" ")
            costs.setdefault(f"calibrate@{name}", {})[drawn] = cost
        record["cost"] = costs


def calibrate_one(context: Context, name: str, run: CalibrateRun, seed: int, out: Path) -> dict[str, Any]:
    """One calibrated model: draw n training images per task, calibrate, write the folder `out`; what that cost."""
    import featcal
    from featcal.data.sampling import draw_indices
    from featcal.models.device import torch_device
    from featcal.suites.load_task import load_task

    layout = context.layout
    assert run.calibration is not None
    tasks = context.suite.pool(run.pool)
    base = layout.base(run.role, run.pool)
    batches = {}
    for task in tasks:
        images = load_task(layout.data, task, "train", base)
        batches[task] = list(images.batches(draw_indices(task, len(images.labels), run.samples, seed), run.batch))
    result = featcal.calibrate(
        layout.merged(run.merged),
        base=base,
        experts={task: layout.expert(run.role, run.pool, task) for task in tasks},
        batches=batches,
        settings=run.calibration,
        device=torch_device(context.suite.device),
        out=out,
        work=layout.unfinished(f"calibrate-{name}".replace(" ", "-")),
        progress=partial(_tell, name),
    )
    return asdict(result.cost)


def _tell(name: str, record: object) -> None:
    console.print(f"  {name}  {record}", soft_wrap=True)
