"""Stage `field`: every merger from the same experts, as it is, with FeatCal, Surgery and SVC behind it, and behind some the rest.

Settings that a method's source chooses on validation samples are chosen there, by the merged model's own scores alone. What is
scored, nobody has seen. The models are not kept; seconds go to the run record.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from featcal.storage.results import SCORES, packed
from reproduction.experiments.runs import Draw, Pool
from reproduction.experiments.studies import FieldStudy
from reproduction.stages.ablate import averages_of
from reproduction.stages.context import Context
from reproduction.stages.evaluate import BATCH, evaluate_model
from reproduction.stages.scored import Scored
from reproduction.stages.scoring import Counts, score_models
from reproduction.stages.study import Found, run_study
from reproduction.stages.workers import fan_out

T = TypeVar("T")
BEHIND = ("featcal", "surgery", "svc")  # what is put behind every merged model
TRAINED = ("prodistill", "surgery_v2", "interv_merge")  # and, as it takes minutes, behind some
DEEP = ("surgery_v2", "interv_merge")  # adapters inside the model
TRAINED_BATCH = 16  # samples of each task in a step of ProDistill: of eight tasks the source's 128
ADAPTED_BATCH = 16  # samples of one step of a merger that adapts without labels


def run(key: str) -> None:
    """Write outputs/<suite>/field/<key>/: field.csv, .correct.csv and .settings.json; no rows where the suite does not run it."""
    run_study("field", key, compared, SCORES)


def compared(context: Context, key: str, study: FieldStudy, folder: Path) -> Found:
    """Rows of every merger and of what is put behind it, and the settings that were chosen."""
    longest_first = sorted(study.mergers, key=lambda name: name not in study.trained)
    jobs = {name: (context, study, name, folder / name) for name in longest_first}
    made = dict(fan_out(f"field {key}", make, jobs, context.suite.workers))
    models = [model for name in study.mergers for model in models_of(study, name, folder / name)]
    tasks = context.suite.tasks_of(study.role, study.pool)
    scores = score_models(evaluate, context, f"field {key}", study.role, study.pool, models, tasks)
    told = {"study": asdict(study), "chosen": {name: made[name]["chosen"] for name in study.mergers}}
    told["tried"] = {name: made[name]["tried"] for name in study.mergers if made[name]["tried"]}
    seconds = {name: made[name]["seconds"] for name in study.mergers}
    return Found([row for model in models for row in scores[model.name]], told=told, record={"cost": seconds})


def models_of(study: FieldStudy, name: str, folder: Path) -> list[Scored]:
    """What is scored of one merger."""
    found = [Scored(name, folder / "merged", "merged", name)]
    for method in (*BEHIND, *(TRAINED if name in study.trained else ())):
        more = {"adapted_model": name} if method in ("surgery", *DEEP) else {}
        setting, seed = ("", "") if method == "svc" else (study.rivals.setting, study.seed)
        found.append(Scored(f"{name}/{method}", folder / method, method, name, setting, seed, **more))
    return found


def make(context: Context, study: FieldStudy, name: str, out: Path) -> dict[str, Any]:
    """One merger and what is put behind it, as folders; its settings, what was tried for them, and seconds."""
    import featcal
    from featcal.models.device import torch_device
    from featcal.rivals.deep_adapters import deep_adapters
    from featcal.rivals.pool import adapters_for
    from reproduction.stages.streams import samples_of, streams

    layout, device, seconds = context.layout, torch_device(context.suite.device), dict[str, float]()
    base, tasks = layout.base(study.role, study.pool), context.suite.tasks_of(study.role, study.pool)
    experts = {task: layout.expert(study.role, study.pool, task) for task in tasks}
    out.mkdir(parents=True)

    def timed(part: str, function: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = function()
        seconds[part] = round(time.perf_counter() - start, 2)
        return result

    needs = data_of(context, study, name)
    tried = study.tried(name)
    values = timed("choosing", lambda: validated(context, study, name, base, experts, needs)) if len(tried) > 1 else [0.0]
    settings = tried[max(range(len(tried)), key=lambda i: (round(values[i], 4), -i))]
    merged = out / "merged"
    timed("merged", lambda: featcal.merge(name, base, experts, out=merged, device=device, **needs, **settings))
    draw = Draw("train", study.samples, study.rivals.batch, study.seed)
    batches = streams(context, study.role, study.pool, draw)
    calibration = study.rivals.featcal
    timed(
        "featcal",
        lambda: featcal.calibrate(
            merged,
            base=base,
            experts=experts,
            batches=batches,
            settings=calibration,
            device=device,
            out=out / "featcal",
            resume=False,
        ),
    )
    projection, _ = samples_of(context, study.role, study.pool)
    seen = streams(context, study.role, study.pool, study.rivals.draw("surgery", study.samples, study.seed))
    surgery = study.rivals.surgery
    adapters = timed("surgery", lambda: adapters_for(surgery, merged, experts, seen, projection, study.seed, device, None))
    adapters.save(out / "surgery")
    timed("svc", lambda: featcal.svc(merged, base, experts, out=out / "svc", device=device))
    if name in study.trained:
        pieces = streams(context, study.role, study.pool, Draw("train", study.samples, TRAINED_BATCH, study.seed))
        more: dict[str, Any] = {"epochs": study.epochs, "seed": study.seed, "out": out / "prodistill", "device": device}
        timed("prodistill", lambda: featcal.prodistill(merged, base, experts, pieces, **more))
        for method in DEEP:
            start = getattr(study, method), merged, experts, seen, projection, study.seed, device, None
            timed(method, partial(deep_adapters, *start)).save(out / method)
    kept = {"settings": settings, "values": values} if len(tried) > 1 else {}
    found = [{**one, "value": round(value, 4)} for one, value in zip(tried, kept.get("values", ()), strict=False)]
    return {"chosen": settings, "tried": found, "seconds": seconds}


def evaluate(context: Context, role: str, pool: Pool, model: Scored, corrected: Sequence[Scored]) -> dict[str, Counts]:
    """As evaluate_model; behind adapters that sit inside the model, it runs with those of each task in it."""
    deep = [other for other in corrected if other.method in DEEP]
    found = evaluate_model(context, role, pool, model, [other for other in corrected if other not in deep])
    return found | {other.name: evaluate_inside(context, role, pool, model, other) for other in deep}


def evaluate_inside(context: Context, role: str, pool: Pool, model: Scored, other: Scored) -> Counts:
    """What a model gets right of every task with the task's adapters in it."""
    from safetensors.torch import load_file

    from featcal.data.images import ImageSet
    from featcal.evaluation.accuracy import evaluate_pool, percent
    from featcal.models.device import torch_device
    from featcal.models.load import load_as_calibrated
    from featcal.rivals.deep_adapters import DeepAdapters
    from reproduction.suites.load_task import load_task

    assert model.folder is not None and other.folder is not None
    layout, device, counts = context.layout, torch_device(context.suite.device), Counts()
    tensors, adapters = load_file(layout.heads(role, pool)), DeepAdapters.load(other.folder)
    projection = tensors.get("visual_projection")
    encoder: Any = load_as_calibrated(model.folder).to(device)
    for task in context.suite.tasks_of(role, pool):
        samples = load_task(layout.data_of(role), task, "test", layout.base(role, pool))
        samples = replace(samples, device=device) if isinstance(samples, ImageSet) else samples
        heads, adapted = {task: tensors[f"head/{task}"]}, {other.name: (model.name, adapters.apply)}
        with adapters.inside(encoder, task):
            judged = evaluate_pool({model.name: encoder}, {task: samples}, heads, projection, BATCH, adapted)
        right = judged[other.name][task]
        counts[task] = {"value": percent(right), "count": len(right), "correct": packed(right)}
    return counts


def data_of(context: Context, study: FieldStudy, name: str) -> dict[str, Any]:
    """Samples and heads where a method needs them: training samples, or the adapters' stream where it adapts to those."""
    from featcal.merging.methods import method_named
    from reproduction.stages.streams import streams

    method = method_named(name)
    if not method.data:
        return {}
    draw = Draw("train", study.samples, study.batch, study.seed)
    if name == "adamerging":
        draw = Draw(study.rivals.stream, None, ADAPTED_BATCH, study.seed)
    heads = {"head": context.layout.heads(study.role, study.pool)} if method.head else {}
    return {"batches": streams(context, study.role, study.pool, draw), **heads}


def validated(
    context: Context, study: FieldStudy, name: str, base: Path, experts: dict[str, Path], needs: dict[str, Any]
) -> list[float]:
    """Average accuracy on validation samples at everything that is tried.

    Where that is the scale alone and the method adds nothing but s τ, it merges once: the others are the base plus so much of it.
    """
    import featcal
    from featcal.models.device import torch_device

    device, tried = torch_device(context.suite.device), study.tried(name)
    alone = all({**one, "scale": None} == {**tried[0], "scale": None} for one in tried) and name not in ("mats",)
    models: dict[int, Any] = {}
    whole = featcal.merge(name, base, experts, device=device, **needs, **{**tried[0], "scale": 1.0}) if alone else None
    for i, settings in enumerate(tried):
        if whole is None:
            models[i] = featcal.merge(name, base, experts, device=device, **needs, **settings)
        else:
            from featcal.models.load import load_as_calibrated

            start = load_as_calibrated(base)
            models[i] = featcal.merge("task_arithmetic", start, {"merged": whole}, scale=settings["scale"])
    values = averages_of(context, study.role, study.pool, models, "validation", study.rows, study.seed)
    return [values[i] for i in range(len(tried))]
