"""Stage `calibrate`: FeatCal on merged models, once per setting and seed of the draw; of language
models the anchor too.
"""

from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from featcal.files import atomic_folder
from reproduction.experiments.runs import ANCHOR, TEXT_POOLS, CalibrateRun, Draw
from reproduction.stages.context import Context, load_context, not_run, recorded, runs_of
from reproduction.stages.workers import fan_out, tell


def run(key: str) -> None:
    """Write outputs/<suite>/calibrated/<merged>-<setting>/seed<NN>/ for a role and pool, or for one
    merged model of them.

    Of language models also ablated/<merged>-<setting>/anchor/. Folders are empty where the suite
    does not run it.
    """
    context = load_context()
    runs = runs_of("calibrate", context.experiments.calibrate, key)
    with recorded(context, "calibrate", key) as record:
        anchors = {
            name: (context, run, context.layout.ablated(name))
            for name, run in runs.items()
            if run.pool in TEXT_POOLS
        }
        for _ in fan_out(f"anchors {key}", write_anchor, anchors, context.suite.workers):
            pass
        jobs = {}
        for name, run in runs.items():
            if run.calibration is None or not context.plays(run.role, run.pool):
                not_run(context, f"calibrate {name}", context.layout.calibrated(name, 0).parent)
                continue
            for seed in run.seeds:
                told = f"{name} seed {seed}"
                jobs[told] = (context, told, run, seed, context.layout.calibrated(name, seed))
        costs: dict[str, dict[str, Any]] = {}
        for told, cost in sorted(
            fan_out(f"calibrate {key}", calibrate_one, jobs, context.suite.workers)
        ):
            name, _, drawn = told.partition(" ")
            costs.setdefault(f"calibrate@{name}", {})[drawn] = cost
        record["cost"] = costs


def calibrate_one(
    context: Context, name: str, run: CalibrateRun, seed: int, out: Path
) -> dict[str, Any]:
    """One calibrated model: draw n training samples per task, calibrate, write the folder `out`;
    what that cost.
    """
    import featcal
    from featcal.models.load import torch_device
    from reproduction.stages.streams import plan_of, streams

    layout, draw = (
        context.layout,
        Draw(stream="train", samples=run.samples, batch=run.batch, seed=seed),
    )
    assert run.calibration is not None
    batches = streams(context, run.role, run.pool, draw, reading=run.reading)
    start = perf_counter()
    featcal.calibrate(
        layout.merged(run.merged),
        base=layout.base(run.role, run.pool),
        experts={task: layout.expert(run.role, run.pool, task) for task in batches},
        batches=batches,
        settings=run.calibration,
        plan=plan_of(context, run.role, run.pool, run.reading),
        device=torch_device(context.suite.device),
        out=out,
        work=layout.unfinished(f"calibrate-{name}".replace(" ", "-")),
        progress=partial(tell, name),
    )
    return {"seconds": round(perf_counter() - start, 3)}


def write_anchor(context: Context, run: CalibrateRun, out: Path) -> None:
    """The folder `out` with base + ρ (merged − base), which is what every weight is drawn to:
    FeatCal without a look at any text.

    The folder is empty where the suite does not run it.
    """
    import featcal

    base, merged = context.layout.base(run.role, run.pool), context.layout.merged(run.merged)
    with atomic_folder(out) as folder:
        if run.calibration is not None and context.plays(run.role, run.pool):
            scale = run.calibration.anchor_blend
            featcal.merge(
                "task_arithmetic", base, {"merged": merged}, scale=scale, out=folder / ANCHOR
            )
