"""Stage `field`: every merger from the same experts, as it is and with FeatCal, adapters and SVC
behind it, and what trains.

FeatCal stands behind it twice: as the suite has it, and with what goes beyond the paper. Where the
study tells scales of it, task arithmetic in the tangent space stands beside them.

Settings that a method's source chooses on validation samples are chosen there, by the merged
model's own scores alone. What is scored, nobody has seen. The models are not kept; seconds go to
the run record.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from featcal.settings import PRESETS
from reproduction.experiments.field import TANGENT, FieldStudy
from reproduction.experiments.runs import Draw, Pool
from reproduction.results import SCORES
from reproduction.stages import scoring
from reproduction.stages.context import Context
from reproduction.stages.scored import Scored
from reproduction.stages.scoring import Counts, score_models
from reproduction.stages.study import Found, run_study
from reproduction.stages.workers import fan_out

T = TypeVar("T")
KEPT: dict[
    tuple[Any, ...], Any
] = {}  # what a process has read or computed that is the same for every merger
OUTER = ("surgery", "prob_surgery")  # adapters behind the last feature
DEEP = ("surgery_v2", "interv_merge")  # adapters inside the model
PARTS = (
    "merged",
    "expert",
)  # in the tangent space: the merged model, and each task's own expert as one row
TRAINED_BATCH = 16  # samples of each task in a step of ProDistill: of eight tasks the source's 128
ADAPTED_BATCH = 16  # samples of one step of a merger that adapts without labels


def run(key: str) -> None:
    """Write outputs/<suite>/field/<key>/: field.csv, .correct.csv and .settings.json; no rows where
    the suite does not run it.
    """
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
    scores = score_models(
        partial(evaluate_model, study),
        context,
        f"field {key}",
        study.role,
        study.pool,
        models,
        tasks,
    )
    told = {
        "study": study.model_dump(),
        "chosen": {name: made[name]["chosen"] for name in study.mergers},
        "preset": PRESETS["best"],
    }
    told["tried"] = {name: made[name]["tried"] for name in study.mergers if made[name]["tried"]}
    seconds = {name: made[name]["seconds"] for name in names}
    return Found(
        [row for model in models for row in scores[model.name]], told=told, record={"cost": seconds}
    )


def models_of(study: FieldStudy, name: str, folder: Path) -> list[Scored]:
    """What is scored of one merger."""
    if name == TANGENT:
        return [Scored(f"{TANGENT}/{part}", folder / part, part, TANGENT) for part in PARTS]
    found = [Scored(name, folder / "merged", "merged", name)]
    for method in study.behind(name):
        more = {"adapted_model": name} if method in (*OUTER, *DEEP) else {}
        setting, seed = ("", "") if method == "svc" else (study.rivals.setting, study.seed)
        setting = "best" if method == "featcal_best" else setting
        found.append(
            Scored(f"{name}/{method}", folder / method, method, name, setting, seed, **more)
        )
    return found


def kept(key: tuple[Any, ...], found: Callable[[], T]) -> T:
    """What is in KEPT by that name, found where it is not."""
    if key not in KEPT:
        KEPT[key] = found()
    result: T = KEPT[key]
    return result


@dataclass(frozen=True)
class Clock:
    """Runs what it is given; seconds by part."""

    seconds: dict[str, float] = field(default_factory=dict)

    def __call__(self, part: str, function: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = function()
        self.seconds[part] = round(self.seconds.get(part, 0.0) + time.perf_counter() - start, 2)
        return result


def make(context: Context, study: FieldStudy, name: str, out: Path) -> dict[str, Any]:
    """One merger and what is put behind it, as folders; its settings, what was tried for them, and
    seconds.
    """
    timed = Clock()
    out.mkdir(parents=True)
    if name == TANGENT:
        from reproduction.field import tangent

        one: tuple[Any, Any] = tangent.make(context, study, out, timed)
    else:
        one = merge_and_repair(context, study, name, out, timed)
    return {"chosen": one[0], "tried": one[1], "seconds": timed.seconds}


def merge_and_repair(
    context: Context, study: FieldStudy, name: str, out: Path, timed: Clock
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A merger of the usual experts, and what is put behind it."""
    import featcal
    from featcal.baselines.training import pool_features
    from featcal.models.load import torch_device
    from reproduction.field.inner_adapters import inner_adapters
    from reproduction.field.prodistill import prodistill
    from reproduction.field.svc import svc
    from reproduction.stages.streams import projection_of

    layout, device = context.layout, torch_device(context.suite.device)
    base, tasks = (
        layout.base(study.role, study.pool),
        context.suite.tasks_of(study.role, study.pool),
    )
    experts = {task: layout.expert(study.role, study.pool, task) for task in tasks}
    merged = out / "merged"
    settings, tried = merge(context, study, name, base, experts, merged, timed)
    batches = drawn(
        context,
        study,
        Draw(stream="train", samples=study.samples, batch=study.rivals.batch, seed=study.seed),
    )
    for method, calibration in {
        "featcal": study.rivals.featcal,
        "featcal_best": featcal.Calibration.preset("best"),
    }.items():
        given: dict[str, Any] = {
            "base": base,
            "experts": experts,
            "batches": batches,
            "settings": calibration,
        }
        given |= {"device": device, "out": out / method, "resume": False}
        timed(method, partial(featcal.calibrate, merged, **given))
    projection = projection_of(context, study.role, study.pool)
    seen = drawn(context, study, study.rivals.draw("surgery", study.samples, study.seed))
    theirs, timed.seconds["features"] = kept(
        ("features",), lambda: expert_features(experts, seen, projection, device)
    )
    pairs = timed("features", partial(pool_features, merged, theirs, seen, projection, device))
    for method in OUTER:
        timed(method, partial(getattr(study.rivals, method).fit, pairs, study.seed)).save(
            out / method
        )
    timed("svc", lambda: svc(merged, base, experts, out=out / "svc", device=device))
    if name in study.trained:
        pieces = drawn(
            context,
            study,
            Draw(stream="train", samples=study.samples, batch=TRAINED_BATCH, seed=study.seed),
        )
        more: dict[str, Any] = {
            "epochs": study.epochs,
            "seed": study.seed,
            "out": out / "prodistill",
            "device": device,
        }
        timed("prodistill", lambda: prodistill(merged, base, experts, pieces, **more))
        for method in DEEP:
            start = (
                getattr(study, method),
                merged,
                experts,
                seen,
                projection,
                study.seed,
                device,
            )
            timed(method, partial(inner_adapters, *start)).save(out / method)
    return settings, tried


def merge(
    context: Context,
    study: FieldStudy,
    name: str,
    base: Path,
    experts: dict[str, Path],
    out: Path,
    timed: Clock,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The merged model as the folder `out`, its settings, and what was tried for its scale, with
    accuracy on validation samples.

    It is merged once, whatever the number of scales.
    """
    import featcal
    from featcal.merging.merge import open_merge
    from featcal.models.load import torch_device

    device, scales, settings = (
        torch_device(context.suite.device),
        study.scales(name),
        study.settings(name),
    )
    given: dict[str, Any] = {"device": device, **data_of(context, study, name), **settings}
    if not scales:
        timed("merged", lambda: featcal.merge(name, base, experts, out=out, **given))
        return settings, []
    at_scale = timed("merged", lambda: open_merge(name, base, experts, **given).at_scales())
    place = (context, study.role, study.pool)
    validation = partial(read, context, study, "validation")
    values = timed(
        "choosing",
        lambda: scoring.averages(*place, {scale: at_scale(scale) for scale in scales}, validation),
    )
    best = max(scales, key=lambda scale: (round(values[scale], 4), -scale))
    timed("merged", lambda: at_scale(best, out=out))
    return {**settings, "scale": best}, [
        {**settings, "scale": s, "value": round(values[s], 4)} for s in scales
    ]


def data_of(context: Context, study: FieldStudy, name: str) -> dict[str, Any]:
    """Samples and heads where a method needs them: training samples, or the adapters' stream where
    it adapts to those.
    """
    from featcal.merging.registry import method_named
    from reproduction.stages.streams import streams

    method = method_named(name)
    if not method.needs:
        return {}
    heads = {"head": context.layout.heads(study.role, study.pool)} if "head" in method.needs else {}
    if name == "adamerging":
        draw = Draw(stream=study.rivals.stream, samples=None, batch=ADAPTED_BATCH, seed=study.seed)
        return {"batches": streams(context, study.role, study.pool, draw), **heads}
    return {
        "batches": drawn(
            context,
            study,
            Draw(stream="train", samples=study.samples, batch=study.batch, seed=study.seed),
        ),
        **heads,
    }


def expert_features(
    experts: Mapping[str, Path], seen: Mapping[str, Iterable[Any]], projection: Any, device: Any
) -> tuple[dict[str, Any], float]:
    """The experts' features of what adapters see, which are the same behind every merger, and
    seconds.
    """
    import torch

    from featcal.baselines.training import as_module, pairs_of_several

    start, nobody = (
        time.perf_counter(),
        torch.empty(0),
    )  # a pair of which one side alone is asked for
    found = {}
    for task, expert in experts.items():
        pairs = pairs_of_several(
            task, {"": as_module(expert, device)}, nobody, seen[task], projection
        )
        found[task] = pairs[""].merged
    return found, time.perf_counter() - start


def drawn(context: Context, study: FieldStudy, draw: Draw) -> dict[str, Any]:
    """Batches of every task for a draw, whose samples are read once in a process."""
    from reproduction.stages.streams import streams

    one = draw.but(batch=1)
    samples = kept(("drawn", one), lambda: streams(context, study.role, study.pool, one))
    return {task: replace(stream, size=draw.batch) for task, stream in samples.items()}


def read(context: Context, study: FieldStudy, split: str, task: str) -> Any:
    """Samples that are scored, or that validate; read once in a process."""
    most = study.scored if split == "test" else study.rows
    chosen = None if most is None else partial(scoring.drawn, most, study.seed)
    return kept(
        (split, task),
        lambda: scoring.samples_of(context, study.role, study.pool, task, split, chosen),
    )


def evaluate_model(
    study: FieldStudy,
    context: Context,
    role: str,
    pool: Pool,
    model: Scored,
    corrected: Sequence[Scored],
) -> dict[str, Counts]:
    """What a model gets right of every task, as it is and with adapters behind it; with those
    inside it, it runs anew.
    """
    from featcal.baselines.adapters import Adapters
    from featcal.models.load import load_as_calibrated, torch_device
    from reproduction.field.inner_adapters import InnerAdapters

    given: dict[str, Any] = {"read": partial(read, context, study, "test")}
    if model.upstream == TANGENT:
        from reproduction.field import tangent

        moved = partial(tangent.encoder, context, role, pool, model)
        return scoring.answers(context, role, pool, lambda task: {model.name: moved(task)}, **given)
    assert model.folder is not None and all(other.folder is not None for other in corrected)
    encoder: Any = load_as_calibrated(model.folder).to(torch_device(context.suite.device))  # type: ignore[arg-type]
    behind = {
        other.name: Adapters.load(other.folder).apply
        for other in corrected
        if other.method not in DEEP
    }  # type: ignore[arg-type]
    found = scoring.answers(
        context, role, pool, lambda _: {model.name: encoder}, changes=behind, **given
    )
    for other in corrected:
        if other.method in DEEP:
            own, found[other.name] = InnerAdapters.load(other.folder), {}  # type: ignore[arg-type]
            for task in context.suite.tasks_of(role, pool):
                with own.inside(encoder, task):
                    changed = {"changes": {other.name: own.apply}, "tasks": (task,), **given}
                    judged = scoring.answers(
                        context, role, pool, lambda _: {model.name: encoder}, **changed
                    )
                found[other.name] |= judged[other.name]
    return found
