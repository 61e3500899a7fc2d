"""Stage `field`: every merger from the same experts, as it is and with FeatCal, adapters and SVC behind it, behind some the rest.

FeatCal stands behind it twice: as the suite has it, and with what goes beyond the paper. Where the study tells scales of it, task
arithmetic in the tangent space stands beside them.

Settings that a method's source chooses on validation samples are chosen there, by the merged model's own scores alone. What is
scored, nobody has seen. The models are not kept; seconds go to the run record.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from featcal.settings import PRESETS
from featcal.storage.results import SCORES, packed
from reproduction.experiments.field import FieldStudy
from reproduction.experiments.runs import Draw, Pool
from reproduction.stages import tangent
from reproduction.stages.context import Context
from reproduction.stages.scored import Scored
from reproduction.stages.scoring import Counts, score_models
from reproduction.stages.study import Found, run_study
from reproduction.stages.tangent import TANGENT
from reproduction.stages.workers import fan_out

T = TypeVar("T")
KEPT: dict[tuple[Any, ...], Any] = {}  # what a process has read or computed that is the same for every merger
BATCH = 50  # samples that are scored at a time: their activations stay in a cache
OUTER = ("surgery", "prob_surgery")  # adapters behind the last feature
DEEP = ("surgery_v2", "interv_merge")  # adapters inside the model
TRAINED_BATCH = 16  # samples of each task in a step of ProDistill: of eight tasks the source's 128
ADAPTED_BATCH = 16  # samples of one step of a merger that adapts without labels


def run(key: str) -> None:
    """Write outputs/<suite>/field/<key>/: field.csv, .correct.csv and .settings.json; no rows where the suite does not run it."""
    run_study("field", key, compared, SCORES)


def compared(context: Context, key: str, study: FieldStudy, folder: Path) -> Found:
    """Rows of every merger and of what is put behind it, and the settings that were chosen."""
    KEPT.clear()  # where the jobs run in this process, it may hold another study's
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


def kept(key: tuple[Any, ...], found: Callable[[], T]) -> T:
    """What is in KEPT by that name, found where it is not."""
    if key not in KEPT:
        KEPT[key] = found()
    result: T = KEPT[key]
    return result


def make(context: Context, study: FieldStudy, name: str, out: Path) -> dict[str, Any]:
    """One merger and what is put behind it, as folders; its settings, what was tried for them, and seconds."""
    seconds: dict[str, float] = {}
    out.mkdir(parents=True)

    def timed(part: str, function: Callable[[], T], more: float = 0.0) -> T:
        start = time.perf_counter()
        result = function()
        seconds[part] = round(seconds.get(part, 0.0) + time.perf_counter() - start + more, 2)
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
    from reproduction.stages.streams import samples_of

    layout, device = context.layout, torch_device(context.suite.device)
    base, tasks = layout.base(study.role, study.pool), context.suite.tasks_of(study.role, study.pool)
    experts = {task: layout.expert(study.role, study.pool, task) for task in tasks}
    merged = out / "merged"
    settings, tried = merge(context, study, name, base, experts, merged, timed)
    batches = drawn(context, study, Draw("train", study.samples, study.rivals.batch, study.seed))
    for method, calibration in {"featcal": study.rivals.featcal, "featcal_best": featcal.Calibration.preset("best")}.items():
        if method in study.behind(name):
            given: dict[str, Any] = {"base": base, "experts": experts, "batches": batches, "settings": calibration}
            given |= {"device": device, "out": out / method, "resume": False}
            timed(method, partial(featcal.calibrate, merged, **given))
    projection, _ = samples_of(context, study.role, study.pool)
    seen = drawn(context, study, study.rivals.draw("surgery", study.samples, study.seed))
    theirs, seconds = kept(("features",), lambda: timed_features(experts, seen, projection, device))
    timed("features", lambda: None, seconds)
    pairs = timed("features", partial(pool_features, merged, theirs, seen, projection, device))
    for method in OUTER:
        timed(method, partial(adapters_from, getattr(study.rivals, method), pairs, study.seed)).save(out / method)
    timed("svc", lambda: featcal.svc(merged, base, experts, out=out / "svc", device=device))
    if name in study.trained:
        pieces = drawn(context, study, Draw("train", study.samples, TRAINED_BATCH, study.seed))
        more: dict[str, Any] = {"epochs": study.epochs, "seed": study.seed, "out": out / "prodistill", "device": device}
        timed("prodistill", lambda: featcal.prodistill(merged, base, experts, pieces, **more))
        for method in DEEP:
            start = getattr(study, method), merged, experts, seen, projection, study.seed, device, None
            timed(method, partial(deep_adapters, *start)).save(out / method)
    return settings, tried


def merge(
    context: Context, study: FieldStudy, name: str, base: Path, experts: dict[str, Path], out: Path, timed: Callable[..., Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The merged model as the folder `out`, its settings, and what was tried for its scale, with accuracy on validation samples.

    It is merged once, whatever the number of scales.
    """
    import featcal
    from featcal.merging.merge import opened_merge
    from featcal.models.device import torch_device

    device, scales, settings = torch_device(context.suite.device), study.scales(name), study.settings(name)
    given: dict[str, Any] = {"device": device, **data_of(context, study, name), **settings}
    if not scales:
        timed("merged", lambda: featcal.merge(name, base, experts, out=out, **given))
        return settings, []
    vectors = timed("merged", lambda: opened_merge(name, base, experts, **given).vectors())
    values = timed("choosing", lambda: averages(context, study, {scale: vectors.at(scale) for scale in scales}))
    best = max(scales, key=lambda scale: (round(values[scale], 4), -scale))
    timed("merged", lambda: vectors.at(best, out=out))
    return {**settings, "scale": best}, [{**settings, "scale": s, "value": round(values[s], 4)} for s in scales]


def data_of(context: Context, study: FieldStudy, name: str) -> dict[str, Any]:
    """Samples and heads where a method needs them: training samples, or the adapters' stream where it adapts to those."""
    from featcal.merging.methods import method_named
    from reproduction.stages.streams import streams

    method = method_named(name)
    if not method.data:
        return {}
    heads = {"head": context.layout.heads(study.role, study.pool)} if method.head else {}
    if name == "adamerging":
        return {
            "batches": streams(context, study.role, study.pool, Draw(study.rivals.stream, None, ADAPTED_BATCH, study.seed)),
            **heads,
        }
    return {"batches": drawn(context, study, Draw("train", study.samples, study.batch, study.seed)), **heads}


def timed_features(
    experts: Mapping[str, Path], seen: Mapping[str, Iterable[Any]], projection: Any, device: Any
) -> tuple[dict[str, Any], float]:
    """The experts' features of what adapters see, which are the same behind every merger, and seconds."""
    import torch

    from featcal.models.mode import evaluation_mode
    from featcal.rivals.features import rows_before_head
    from featcal.rivals.pool import as_module

    start, found = time.perf_counter(), {}
    for task, folder in experts.items():
        expert = as_module(folder, device)
        with evaluation_mode([expert]):
            found[task] = torch.cat([rows_before_head(expert, batch, projection)[0] for batch in seen[task]])
    return found, time.perf_counter() - start


def drawn(context: Context, study: FieldStudy, draw: Draw) -> dict[str, Any]:
    """Batches of every task for a draw, whose samples are read once in a process."""
    from reproduction.stages.streams import streams

    one = replace(draw, batch=1)
    samples = kept(("drawn", one), lambda: streams(context, study.role, study.pool, one))
    return {task: replace(stream, size=draw.batch) for task, stream in samples.items()}


def averages(context: Context, study: FieldStudy, models: Mapping[float, Any]) -> dict[float, float]:
    """Average accuracy over the tasks of every model, in percent, on validation samples."""
    judged = answers(context, study, "validation", {str(scale): model for scale, model in models.items()})
    return {scale: sum(float(one["value"]) for one in judged[str(scale)].values()) / len(judged[str(scale)]) for scale in models}


def answers(
    context: Context,
    study: FieldStudy,
    split: str,
    models: Mapping[str, Any],
    changes: Mapping[str, Any] | None = None,
    *tasks: str,
) -> dict[str, Counts]:
    """What models, or of each task one, get right on a split, and what is right once the features of the first are changed.

    tasks: all where none is named.
    """
    from safetensors.torch import load_file

    from featcal.data.images import ImageSet
    from featcal.data.sampling import draw_indices
    from featcal.evaluation.accuracy import evaluate_pool, percent
    from featcal.models.device import torch_device
    from reproduction.suites.load_task import load_task

    layout, device = context.layout, torch_device(context.suite.device)
    tensors, first = load_file(layout.heads(study.role, study.pool)), next(iter(models))
    most = study.scored if split == "test" else study.rows

    def read(task: str) -> Any:
        samples = load_task(layout.data_of(study.role), task, split, layout.base(study.role, study.pool))
        count = len(samples.labels)
        if most is not None and most < count:
            samples = samples.take(sorted(draw_indices(task, count, most, study.seed)))
        return replace(samples, device=device) if isinstance(samples, ImageSet) else samples

    tasks = tasks or tuple(context.suite.tasks_of(study.role, study.pool))
    sets = {task: kept((split, task), partial(read, task)) for task in tasks}
    heads = {task: tensors[f"head/{task}"] for task in tasks}
    adapted = {name: (first, change) for name, change in (changes or {}).items()}
    judged = evaluate_pool(models, sets, heads, tensors.get("visual_projection"), BATCH, adapted)
    return {
        name: {task: {"value": percent(r), "count": len(r), "correct": packed(r)} for task, r in own.items()}
        for name, own in judged.items()
    }


def evaluate(
    study: FieldStudy, context: Context, role: str, pool: Pool, model: Scored, corrected: Sequence[Scored]
) -> dict[str, Counts]:
    """What a model gets right of every task, as it is and with adapters behind it; with those inside it, it runs anew."""
    from featcal.models.device import torch_device
    from featcal.models.load import load_as_calibrated
    from featcal.rivals.adapters import Adapters
    from featcal.rivals.deep_adapters import DeepAdapters

    if model.upstream == TANGENT:
        tasks = context.suite.tasks_of(role, pool)
        return answers(context, study, "test", {model.name: {t: tangent.encoder(context, role, pool, model, t) for t in tasks}})
    assert model.folder is not None and all(other.folder is not None for other in corrected)
    encoder: Any = load_as_calibrated(model.folder).to(torch_device(context.suite.device))  # type: ignore[arg-type]
    behind = {other.name: Adapters.load(other.folder).apply for other in corrected if other.method not in DEEP}  # type: ignore[arg-type]
    found = answers(context, study, "test", {model.name: encoder}, behind)
    for other in corrected:
        if other.method in DEEP:
            own, found[other.name] = DeepAdapters.load(other.folder), {}  # type: ignore[arg-type]
            for task in context.suite.tasks_of(role, pool):
                with own.inside(encoder, task):
                    judged = answers(context, study, "test", {model.name: encoder}, {other.name: own.apply}, task)
                found[other.name] |= judged[other.name]
    return found
