"""Stage `field`: every merger from the same experts, as it is and with FeatCal, adapters and SVC behind it, behind some the rest.

FeatCal stands behind it twice: as the suite has it, and with what goes beyond the paper. Where the study tells scales of it, task
arithmetic in the tangent space stands beside them.

Settings that a method's source chooses on validation samples are chosen there, by the merged model's own scores alone. What is
scored, nobody has seen. The models are not kept; seconds go to the run record.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from featcal.settings import PRESETS
from featcal.storage.results import SCORES
from reproduction.experiments.runs import Draw, Pool
from reproduction.experiments.studies import FieldStudy
from reproduction.stages import tangent
from reproduction.stages.ablate import averages_of
from reproduction.stages.context import Context
from reproduction.stages.evaluate import answers
from reproduction.stages.scored import Scored
from reproduction.stages.scoring import Counts, score_models
from reproduction.stages.study import Found, run_study
from reproduction.stages.tangent import TANGENT
from reproduction.stages.workers import fan_out

T = TypeVar("T")
OUTER = ("surgery", "prob_surgery")  # adapters behind the last feature
DEEP = ("surgery_v2", "interv_merge")  # adapters inside the model
TRAINED_BATCH = 16  # samples of each task in a step of ProDistill: of eight tasks the source's 128
ADAPTED_BATCH = 16  # samples of one step of a merger that adapts without labels


def run(key: str) -> None:
    """Write outputs/<suite>/field/<key>/: field.csv, .correct.csv and .settings.json; no rows where the suite does not run it."""
    run_study("field", key, compared, SCORES)


def compared(context: Context, key: str, study: FieldStudy, folder: Path) -> Found:
    """Rows of every merger and of what is put behind it, and the settings that were chosen."""
    names = [*study.mergers, *([TANGENT] if study.tangent else [])]
    longest_first = sorted(names, key=lambda name: (name not in study.trained, name != TANGENT))
    jobs = {name: (context, study, name, folder / name) for name in longest_first}
    made = dict(fan_out(f"field {key}", make, jobs, context.suite.workers))
    models = [model for name in names for model in models_of(study, name, folder / name)]
    tasks = context.suite.tasks_of(study.role, study.pool)
    scores = score_models(partial(evaluate, study), context, f"field {key}", study.role, study.pool, models, tasks)
    told = {"study": asdict(study), "chosen": {name: made[name]["chosen"] for name in study.mergers}, "preset": PRESETS["best"]}
    told["tried"] = {name: made[name]["tried"] for name in study.mergers if made[name]["tried"]}
    seconds = {name: made[name]["seconds"] for name in names}
    return Found([row for model in models for row in scores[model.name]], told=told, record={"cost": seconds})


def models_of(study: FieldStudy, name: str, folder: Path) -> list[Scored]:
    """What is scored of one merger."""
    if name == TANGENT:
        return tangent.models_of(folder)
    found = [Scored(name, folder / "merged", "merged", name)]
    for method in study.behind(name):
        more = {"adapted_model": name} if method in (*OUTER, *DEEP) else {}
        setting, seed = ("", "") if method == "svc" else (study.rivals.setting, study.seed)
        setting = "best" if method == "featcal_best" else setting
        found.append(Scored(f"{name}/{method}", folder / method, method, name, setting, seed, **more))
    return found


def make(context: Context, study: FieldStudy, name: str, out: Path) -> dict[str, Any]:
    """One merger and what is put behind it, as folders; its settings, what was tried for them, and seconds."""
    seconds: dict[str, float] = {}
    out.mkdir(parents=True)

    def timed(part: str, function: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = function()
        seconds[part] = round(seconds.get(part, 0.0) + time.perf_counter() - start, 2)
        return result

    if name == TANGENT:
        chosen, tried = tangent.make(context, study, out, timed)
    else:
        chosen, tried = merge_and_repair(context, study, name, out, timed)
    return {"chosen": chosen, "tried": tried, "seconds": seconds}


def merge_and_repair(
    context: Context, study: FieldStudy, name: str, out: Path, timed: Callable[[str, Callable[[], Any]], Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A merger of the usual experts, and what is put behind it."""
    import featcal
    from featcal.models.device import torch_device
    from featcal.rivals.deep_training import deep_adapters
    from featcal.rivals.pool import adapters_from, pool_features
    from reproduction.stages.streams import samples_of, streams

    layout, device = context.layout, torch_device(context.suite.device)
    base, tasks = layout.base(study.role, study.pool), context.suite.tasks_of(study.role, study.pool)
    experts = {task: layout.expert(study.role, study.pool, task) for task in tasks}
    needs = data_of(context, study, name)
    tried = study.tried(name)
    values = timed("choosing", lambda: validated(context, study, name, base, experts, needs)) if len(tried) > 1 else [0.0]
    settings = tried[max(range(len(tried)), key=lambda i: (round(values[i], 4), -i))]
    merged = out / "merged"
    timed("merged", lambda: featcal.merge(name, base, experts, out=merged, device=device, **needs, **settings))
    draw = Draw("train", study.samples, study.rivals.batch, study.seed)
    batches = streams(context, study.role, study.pool, draw)
    for method, calibration in {"featcal": study.rivals.featcal, "featcal_best": featcal.Calibration.preset("best")}.items():
        if method in study.behind(name):
            given: dict[str, Any] = {"base": base, "experts": experts, "batches": batches, "settings": calibration}
            given |= {"device": device, "out": out / method, "resume": False}
            timed(method, partial(featcal.calibrate, merged, **given))
    projection, _ = samples_of(context, study.role, study.pool)
    seen = streams(context, study.role, study.pool, study.rivals.draw("surgery", study.samples, study.seed))
    pairs = timed("features", partial(pool_features, merged, experts, seen, projection, device))
    for method in OUTER:
        timed(method, partial(adapters_from, getattr(study.rivals, method), pairs, study.seed)).save(out / method)
    timed("svc", lambda: featcal.svc(merged, base, experts, out=out / "svc", device=device))
    if name in study.trained:
        pieces = streams(context, study.role, study.pool, Draw("train", study.samples, TRAINED_BATCH, study.seed))
        more: dict[str, Any] = {"epochs": study.epochs, "seed": study.seed, "out": out / "prodistill", "device": device}
        timed("prodistill", lambda: featcal.prodistill(merged, base, experts, pieces, **more))
        for method in DEEP:
            start = getattr(study, method), merged, experts, seen, projection, study.seed, device, None
            timed(method, partial(deep_adapters, *start)).save(out / method)
    found = [{**one, "value": round(value, 4)} for one, value in zip(tried, values, strict=True)]
    return settings, found if len(tried) > 1 else []


def evaluate(
    study: FieldStudy, context: Context, role: str, pool: Pool, model: Scored, corrected: Sequence[Scored]
) -> dict[str, Counts]:
    """What a model gets right of every task, as it is and with adapters behind it; with those inside it, it runs anew."""
    from featcal.models.device import torch_device
    from featcal.models.load import load_as_calibrated
    from featcal.rivals.adapters import Adapters
    from featcal.rivals.deep_adapters import DeepAdapters

    told = partial(answers, context, role, pool, model.name, most=scored_of(study))
    if model.upstream == TANGENT:
        return told(partial(tangent.encoder, context, role, pool, model), {})
    assert model.folder is not None and all(other.folder is not None for other in corrected)
    encoder: Any = load_as_calibrated(model.folder).to(torch_device(context.suite.device))  # type: ignore[arg-type]
    behind = {other.name: Adapters.load(other.folder) for other in corrected if other.method not in DEEP}  # type: ignore[arg-type]
    found = told(lambda _: encoder, {name: own.apply for name, own in behind.items()})
    for other in corrected:
        if other.method in DEEP:
            own = DeepAdapters.load(other.folder)  # type: ignore[arg-type]
            inside = told(lambda _: encoder, {other.name: own.apply}, partial(own.inside, encoder))
            found[other.name] = inside[other.name]
    return found


def scored_of(study: FieldStudy) -> Callable[[str, int], Any] | None:
    """Which test samples of a task are scored, of how many; None for all."""
    from featcal.data.sampling import draw_indices

    most = study.scored
    return None if most is None else lambda task, count: sorted(draw_indices(task, count, min(most, count), study.seed))


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
