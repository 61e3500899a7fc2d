"""Stage `calibrate`: FeatCal on one merged model, once per seed of the calibration draw."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from featcal.runs import CalibrateRun
from featcal.stages.context import Context, load_context, pick, recorded
from featcal.stages.workers import console, fan_out
from featcal.storage.atomic import atomic_folder


def run(key: str) -> None:
    """Write outputs/<suite>/calibrated/<key>/seed<NN>/ for every seed; an empty folder where the suite does not run it."""
    context = load_context()
    calibrate = pick("calibrate", context.experiments.calibrate, key)
    with recorded(context, "calibrate", key) as record:
        if calibrate.calibration is None or not context.plays(calibrate.role, calibrate.pool):
            with atomic_folder(context.layout.calibrated(key, 0).parent):
                console.print(f"calibrate {key}: not run in suite {context.suite.name}")
            return
        jobs = {
            f"seed {seed}": (context, f"{key} seed {seed}", calibrate, seed, context.layout.calibrated(key, seed))
            for seed in calibrate.seeds
        }
        costs = fan_out(f"calibrate {key}", calibrate_one, jobs, context.suite.workers)
        record["cost"] = {f"calibrate@{key}": dict(sorted(costs))}


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
        layout.merged(f"{run.role}-{run.pool}-{run.upstream}"),
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
