"""Stage `ablate`: what FeatCal's gain is made of, beside one merged model.

FeatCal without one ingredient each; its anchor alone, base + ρ (merged − base); and the merged model moved along its own change
by the factor that is best on samples that are no test samples.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from featcal.storage.results import write_rows
from reproduction.experiments.runs import ANCHOR, RESCALED, AblateRun, Pool
from reproduction.stages.calibrate import calibrate_one
from reproduction.stages.columns import SCALES
from reproduction.stages.context import Context, load_context, not_run, pick, recorded
from reproduction.stages.workers import fan_out

BATCH = 250


def run(key: str) -> None:
    """Write outputs/<suite>/ablated/<key>/<name>/ for every control, and scales.csv; an empty folder where it is not run."""
    context = load_context()
    ablate = pick("ablate", context.experiments.ablate, key)
    with recorded(context, "ablate", key):
        if ablate is None or not context.plays(ablate.whole.role, ablate.whole.pool):
            not_run(context, f"ablate {key}", context.layout.ablated(key))
            return
        jobs = {name: (context, key, name) for name in (RESCALED, ANCHOR, *ablate.without)}  # the longest first
        for _ in fan_out(f"ablate {key}", ablate_one, jobs, context.suite.workers):
            pass


def ablate_one(context: Context, key: str, name: str) -> None:
    """One control."""
    ablate = context.experiments.ablate[key]
    assert ablate is not None and ablate.whole.calibration is not None
    out = context.layout.ablated(key, name)
    if name in ablate.without:
        changed = replace(ablate.whole, calibration=ablate.without[name])
        calibrate_one(context, f"{key} {name}", changed, changed.seeds[0], out)
        return
    factor = ablate.whole.calibration.anchor_blend if name == ANCHOR else best_factor(context, key, ablate)
    scaled(context, ablate, factor, out)


def scaled(context: Context, ablate: AblateRun, factor: float, out: Any = None) -> Any:
    """base + factor · (merged − base): task arithmetic of one expert, the merged model. Returns: module, or the folder `out`."""
    import featcal

    layout, whole = context.layout, ablate.whole
    base, merged = layout.base(whole.role, whole.pool), layout.merged(f"{whole.role}-{whole.pool}-{whole.upstream}")
    if out is None:
        from featcal.models.load import load_as_calibrated

        return featcal.merge("task_arithmetic", load_as_calibrated(base), {"merged": load_as_calibrated(merged)}, scale=factor)
    return featcal.merge("task_arithmetic", base, {"merged": merged}, scale=factor, out=out)


def best_factor(context: Context, key: str, ablate: AblateRun) -> float:
    """The factor with the highest average on the samples chosen for it, the smallest of equals; the sweep stays as scales.csv."""
    whole, rescale = ablate.whole, ablate.rescale
    models = {factor: scaled(context, ablate, factor) for factor in rescale.factors}
    values = averages_of(context, whole.role, whole.pool, models, rescale.split, rescale.samples, whole.seeds[0])
    best = max(rescale.factors, key=lambda factor: (round(values[factor], 4), -factor))
    words = {"suite": context.suite.name, "role": whole.role, "pool": whole.pool, "upstream": whole.upstream}
    rows = [{**words, "factor": f, "value": values[f], "chosen": int(f == best)} for f in rescale.factors]
    write_rows(context.layout.ablated(key) / "scales.csv", rows, SCALES)
    return best


def averages_of(
    context: Context, role: str, pool: Pool, models: Mapping[Any, Any], split: str, samples: int, seed: int
) -> dict[Any, float]:
    """Average accuracy over the tasks of every model, in percent, on a draw of so many samples of each task, or all there are."""
    from safetensors.torch import load_file

    from featcal.data.sampling import draw_indices
    from featcal.evaluation.accuracy import evaluate_pool
    from featcal.models.device import torch_device
    from reproduction.suites.load_task import load_task

    layout, device, tasks = context.layout, torch_device(context.suite.device), context.suite.tasks_of(role, pool)
    tensors, drawn = load_file(layout.heads(role, pool)), {}
    for task in tasks:
        there = load_task(layout.data_of(role), task, split, layout.base(role, pool))
        drawn[task] = there.take(draw_indices(task, len(there.labels), min(samples, len(there.labels)), seed))
    heads = {task: tensors[f"head/{task}"] for task in tasks}
    placed = {str(name): model.to(device) for name, model in models.items()}
    judged = evaluate_pool(placed, drawn, heads, tensors.get("visual_projection"), BATCH)
    rights = {name: [judged[str(name)][task] for task in tasks] for name in models}
    return {name: 100 * sum(int(right.sum()) / len(right) for right in own) / len(tasks) for name, own in rights.items()}
