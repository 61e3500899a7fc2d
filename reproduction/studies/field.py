"""Every merger from the same experts and samples: alone and, for encoders, with methods after it.

FeatCal runs at the suite's settings and as the library does by default (auto). Settings that a
method's source chooses on validation samples are chosen there, by the merged model's own scores.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from pydantic import NonNegativeInt, PositiveInt
from safetensors.torch import load_file, save_file
from torch import Tensor

import featcal
from featcal.baselines.adapters import Adapters
from featcal.baselines.training import pool_features
from featcal.merging.registry import method_named, settings_of
from featcal.settings import require
from reproduction.engine import score as scoring
from reproduction.engine.context import Setup
from reproduction.engine.samples import Selection, streams
from reproduction.engine.score import TaskScores, averages, highest
from reproduction.engine.spec import ModelSpec
from reproduction.engine.study import StudyResult
from reproduction.experiments import (
    TEXT_POOLS,
    Comparison,
    Numbers,
    SampleDraw,
    Study,
    require_known,
)
from reproduction.field import tangent
from reproduction.field.inner_adapters import InnerAdapters, inner_adapters
from reproduction.field.prodistill import prodistill
from reproduction.field.repair import all_samples, output_moments, renormalised, svc
from reproduction.field.settings import SVC_AFTER, SVC_LEAST, WITHOUT_SVC, IntervMerge, SurgeryV2
from reproduction.results import SCORES
from reproduction.studies.default import AUTO

T = TypeVar("T")
OUTER = ("surgery", "prob_surgery")  # adapters after the last feature
INFERRED = {f"{method}_inferred": method for method in OUTER}  # with the task read off the feature
DEEP = ("surgery_v2", "interv_merge")  # adapters inside the model
TRAINED = ("prodistill", *DEEP)  # methods that train for minutes
TANGENT = "tangent"  # task arithmetic in the tangent space, in results
PARTS = ("merged", "expert")  # of it: the merged model, and each task's own expert as one row
MEANS = "task_means.safetensors"  # next to a merged model: its mean feature of every task
CHOSEN = ("scale", "eta")  # settings that may be a list
TRAINED_BATCH = 16  # samples of each task in a step of ProDistill: the source's 128 of eight tasks
ADAPTED_BATCH = 16  # samples in a step of a merger that adapts without labels


class FieldStudy(Study):
    """Settings of the study.

    mergers: settings by method; samples of `split` choose one of a list, such as scales.
    rows:    how many of each task choose.   scored: test samples of each task; None: all.
    trained: mergers after which the methods of TRAINED are run, ProDistill for `epochs`.
    tangent: scales of task arithmetic in the tangent space; none: not run.
    """

    scores = SCORES
    comparison: Comparison
    mergers: Mapping[str, Mapping[str, Any]]
    samples: PositiveInt
    batch: PositiveInt
    seed: NonNegativeInt
    rows: PositiveInt
    split: Literal["validation", "train"] = "validation"
    trained: tuple[str, ...]
    surgery_v2: SurgeryV2
    interv_merge: IntervMerge
    epochs: PositiveInt
    tangent: Numbers = ()
    scored: PositiveInt | None = None

    def check(self) -> None:
        for merger in self.trained:
            require_known("field.trained", merger, self.mergers)
        stream = self.comparison.stream
        expected = "must hold other samples than are scored: train, or unlabelled"
        require(stream != "test_unlabelled", "field.comparison.stream", stream, expected)
        import reproduction.field.swudi  # noqa: F401 - registers a merger

        for method in self.mergers:
            for options in self.candidates(method):
                settings_of(method, options, f"field.mergers.{method}")

    def chosen_key(self, method: str) -> str:
        """Return the setting that is given as a list, of which validation samples choose one."""
        lists = (key for key in CHOSEN if isinstance(self.mergers[method].get(key), list))
        return next(lists, "")

    def candidates(self, method: str) -> list[dict[str, Any]]:
        options, key = dict(self.mergers[method]), self.chosen_key(method)
        return [{**options, key: value} for value in options[key]] if key else [options]

    def models(self, name: str, folder: Path) -> list[ModelSpec]:
        """Return the scored models of one merger."""
        if name == TANGENT:
            return [ModelSpec(f"{name}/{part}", folder / part, part, name) for part in PARTS]
        models = [ModelSpec(name, folder / "merged", "merged", name)]
        if self.pool in TEXT_POOLS:
            return models
        trained = TRAINED if name in self.trained else ()
        after = ("repair",) if name in WITHOUT_SVC else ("repair", "svc")
        for method in ("featcal", "featcal_auto", *OUTER, *INFERRED, *after, *trained):
            setting, seed = ("", "") if method == "svc" else (self.comparison.setting, self.seed)
            keys = (method, name, AUTO if method == "featcal_auto" else setting, seed)
            corrects = name if method in (*OUTER, *INFERRED, *DEEP) else ""
            path = folder / INFERRED.get(method, method)
            models.append(ModelSpec(f"{name}/{method}", path, *keys, corrects=corrects))
        return models

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        names = [*self.mergers, *([TANGENT] if self.tangent else [])]
        longest_first = sorted(names, key=lambda name: (name not in self.trained, name != TANGENT))
        jobs = {name: (setup, self, name, folder / name) for name in longest_first}
        results = setup.context.run(self.label, make, jobs)
        models = [model for name in names for model in self.models(name, folder / name)]
        rows = scoring.score(f"{self.label} score", setup, models, partial(evaluate, self))
        chosen = {name: results[name][0] for name in self.mergers}
        trials = {name: results[name][1] for name in self.mergers if results[name][1]}
        cost = {name: results[name][2] for name in names}
        return StudyResult(rows, {}, {"chosen": chosen, "tried": trials}, {"cost": cost})


class Clock(dict[str, float]):
    """Seconds by part."""

    def __call__(self, part: str, function: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = function()
        self[part] = round(self.get(part, 0.0) + time.perf_counter() - start, 2)
        return result


def make(
    setup: Setup, study: FieldStudy, name: str, out: Path
) -> tuple[Any, Any, dict[str, float]]:
    """Write one merged model and the methods after it; return settings, trials and seconds."""
    clock = Clock()
    out.mkdir(parents=True)
    if name == TANGENT:
        chosen, trials = tangent.make(setup, study, out, clock)
    else:
        chosen, trials = merge(setup, study, name, out / "merged", clock)
        if not setup.of_texts:
            repair(setup, study, name, out, clock)
    return chosen, trials, dict(clock)


def merge(
    setup: Setup, study: FieldStudy, name: str, out: Path, clock: Clock
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Write the merged model; return its settings, and trials with their validation accuracy."""
    import reproduction.field.swudi  # noqa: F401 - registers a merger

    key, needs, first = study.chosen_key(name), method_named(name).needs, study.candidates(name)[0]
    arguments: dict[str, Any] = {"device": setup.context.device}
    if name == "adamerging":
        draw = {"stream": study.comparison.stream, "samples": None, "batch": ADAPTED_BATCH}
        arguments["batches"] = streams(setup, SampleDraw(**draw, seed=study.seed))
    elif needs:
        arguments["batches"] = streams(setup, study.featcal_draw())
    if "head" in needs:
        arguments["head"] = setup.heads
    merged = partial(featcal.merge, name, setup.base, setup.experts, **arguments)
    if not key:
        clock("merged", partial(merged, out=out, **first))
        return first, []
    candidates = {options[key]: options for options in study.candidates(name)}

    def validated() -> dict[float, float]:
        models = {value: merged(**options) for value, options in candidates.items()}
        return averages(setup, models, Selection(study.split, study.rows, study.seed))

    values = clock("choosing", validated)
    best = candidates[highest(values)]
    clock("merged", partial(merged, out=out, **best))
    return best, [{**candidates[v], "value": round(values[v], 4)} for v in candidates]


def repair(setup: Setup, study: FieldStudy, name: str, out: Path, clock: Clock) -> None:
    """Write the results of all methods after the merged model, out/merged."""
    base, experts, device = setup.base, setup.experts, setup.context.device
    merged, comparison, seed = out / "merged", study.comparison, study.seed
    shared: dict[str, Any] = {"base": base, "experts": experts, "device": device, "resume": False}
    shared["batches"] = streams(setup, study.featcal_draw(batch=comparison.batch))
    for method, settings in {"featcal": comparison.featcal, "featcal_auto": AUTO}.items():
        method_arguments = {"settings": settings, "out": out / method}
        clock(method, partial(featcal.calibrate, merged, **shared, **method_arguments))
    projection, draw = setup.projection(), comparison.draw("surgery", study.samples, seed)
    stream = streams(setup, draw)
    pairs = clock("features", partial(pool_features, merged, experts, stream, projection, device))
    for method in OUTER:
        adapters = clock(method, partial(getattr(comparison, method).fit, pairs, seed))
        adapters.save(out / method)
    save_file({task: pair.merged.mean(0) for task, pair in pairs.items()}, out / MEANS)
    batch = all_samples(streams(setup, study.featcal_draw()))
    moments = output_moments(experts.values(), batch, device)
    clock("repair", lambda: renormalised(merged, moments, batch, out=out / "repair", device=device))
    if name not in WITHOUT_SVC:
        extra: dict[str, Any] = {"least": SVC_AFTER.get(name, SVC_LEAST), "out": out / "svc"}
        clock("svc", partial(svc, merged, base, experts, **extra, device=device))
    if name in study.trained:
        batches = streams(setup, study.featcal_draw(batch=TRAINED_BATCH))
        extra = {"epochs": study.epochs, "seed": seed, "device": device, "out": out / "prodistill"}
        clock("prodistill", partial(prodistill, merged, base, experts, batches, **extra))
        for method in DEEP:
            start = (getattr(study, method), merged, experts, stream, projection, seed, device)
            clock(method, partial(inner_adapters, *start)).save(out / method)


def evaluate(
    study: FieldStudy, setup: Setup, model: ModelSpec, corrected: Sequence[ModelSpec]
) -> dict[str, TaskScores]:
    """Return the scores of a model, alone and with adapters; inner adapters need another run."""
    if setup.of_texts:
        return scoring.evaluate_model(setup, model, corrected, Selection())
    test = partial(Selection("test", study.scored, study.seed).read, setup)
    if model.upstream == TANGENT:
        moved = partial(tangent.encoder, setup, model)
        return scoring.task_scores(setup, lambda task: {model.name: moved(task)}, test)
    encoder = {model.name: setup.load(model.folder)}
    deep, after = [other for other in corrected if other.method in DEEP], dict[str, Any]()
    for other in (other for other in corrected if other not in deep):
        adapters = Adapters.load(other.folder)
        after[other.name] = adapters.apply
        if other.method in INFERRED:
            means = load_file(other.folder.parent / MEANS)
            after[other.name] = partial(inferred, adapters, means)
    scores = scoring.task_scores(setup, lambda _: encoder, test, after)
    for name, inner in ((other.name, InnerAdapters.load(other.folder)) for other in deep):
        scores[name], changed = {}, {name: inner.apply}
        for task in setup.tasks:
            with inner.inside(encoder[model.name], task):
                result = scoring.task_scores(setup, lambda _: encoder, test, changed, (task,))
            scores[name] |= result[name]
    return scores


def inferred(adapters: Adapters, means: Mapping[str, Tensor], _: str, rows: Tensor) -> Tensor:
    """Correct every feature by the adapter of the task of nearest mean; the head knows the task."""
    tasks, result = sorted(means), torch.empty_like(rows)
    nearest = torch.cdist(rows, torch.stack([means[task] for task in tasks]).to(rows)).argmin(1)
    for number, task in enumerate(tasks):
        result[nearest == number] = adapters.apply(task, rows[nearest == number])
    return result
