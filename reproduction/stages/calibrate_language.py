"""Stage `calibrate` of texts: FeatCal on the merged language model of a role, once per setting, and its anchors alone."""

from pathlib import Path
from typing import Any

from featcal.storage.atomic import atomic_folder
from reproduction.experiments.runs import ANCHOR, CalibrateRun, Draw
from reproduction.stages.calibrations import calibrate_all, calibrated
from reproduction.stages.context import Context, load_context, runs_of
from reproduction.stages.text_streams import text_streams
from reproduction.stages.workers import fan_out


def run(key: str) -> None:
    """Write calibrated/<key>-<merger>-<setting>/seed<NN>/ and ablated/<key>-<merger>-<setting>/anchor/ of outputs/<suite>/."""
    context = load_context()
    runs = runs_of("calibrate", context.experiments.calibrate, key)
    jobs = {name: (context, run, context.layout.ablated(name)) for name, run in runs.items()}
    for _ in fan_out(f"anchors {key}", write_anchor, jobs, context.suite.workers):
        pass
    calibrate_all(context, key, runs, calibrate_one)


def write_anchor(context: Context, run: CalibrateRun, out: Path) -> None:
    """The folder `out` with base + ρ (merged − base), which is what every weight is drawn to: FeatCal without a look at any text.

    The folder is empty where the suite does not run it.
    """
    import featcal

    base, merged = context.layout.base(run.role, run.pool), context.layout.merged(run.merged)
    with atomic_folder(out) as folder:
        if run.calibration is not None and context.plays(run.role, run.pool):
            scale = run.calibration.anchor_blend
            featcal.merge("task_arithmetic", base, {"merged": merged}, scale=scale, out=folder / ANCHOR)


def calibrate_one(context: Context, name: str, run: CalibrateRun, seed: int, out: Path) -> dict[str, Any]:
    """One calibrated model: draw n training texts per task, calibrate, write the folder `out`; what that cost."""
    assert run.reading is not None
    batches, plan = text_streams(context, run.role, run.pool, Draw("train", run.samples, run.batch, seed), run.reading)
    return calibrated(context, name, run, batches, out, plan)
