"""Every merger from the same experts and samples: alone and with FeatCal, adapters, REPAIR, SVC and
what trains for minutes.

Language models have the mergers alone. FeatCal is run twice: at the settings of the suite, and as
the library does by default (auto). Settings that a method's source
chooses on validation samples are chosen there, by the merged model's own scores alone. Nobody has
seen what is scored. Seconds go to the run record.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import NonNegativeInt, PositiveInt

from featcal.merging.registry import settings_of
from featcal.settings import require
from reproduction.engine import score as scoring
from reproduction.engine.context import Setup
from reproduction.engine.samples import Selection, streams
from reproduction.engine.score import Counts, averages
from reproduction.engine.spec import ModelSpec
from reproduction.engine.study import StudyResult
from reproduction.experiments import TEXT_POOLS, Draw, Numbers, Rivals, Study
from reproduction.field.settings import SVC_AFTER, SVC_LEAST, WITHOUT_SVC, IntervMerge, SurgeryV2
from reproduction.results import SCORES
from reproduction.studies.default import AUTO

if TYPE_CHECKING:  # a stage's own process loads no torch
    from torch import Tensor

    from featcal.baselines.adapters import Adapters

T = TypeVar("T")
OUTER = ("surgery", "prob_surgery")  # adapters after the last feature
INFERRED = {f"{method}_inferred": method for method in OUTER}  # with the task read off the feature
DEEP = ("surgery_v2", "interv_merge")  # adapters inside the model
TRAINED = ("prodistill", *DEEP)  # what trains for minutes
TANGENT = "tangent"  # task arithmetic in the tangent space, in results
PARTS = ("merged", "expert")  # of it: the merged model, and each task's own expert as one row
MEANS = "task_means.safetensors"  # next to a merged model: its mean feature of every task
CHOSEN = ("scale", "eta")  # settings that may be a list
TRAINED_BATCH = 16  # samples of each task in a step of ProDistill: the source's 128 of eight tasks
ADAPTED_BATCH = 16  # samples in a step of a merger that adapts without labels
Seconds = dict[str, float]  # by part
KEPT: dict[tuple[Any, ...], Any] = {}  # what a process has read or computed for every merger


class FieldStudy(Study):
    """Settings of the study.

    mergers: settings by method; validation samples choose one of a list, such as scales.
    rows:    validation samples of each task.   scored: test samples of each task; None: all.
    trained: mergers with which the methods of TRAINED are run too, ProDistill for `epochs`.
    tangent: scales of task arithmetic in the tangent space; none: not run.
    """

    section = "field"
    scores = SCORES
    rivals: Rivals
    mergers: Mapping[str, Mapping[str, Any]]
    samples: PositiveInt
    batch: PositiveInt
    seed: NonNegativeInt
    rows: PositiveInt
    trained: tuple[str, ...]
    surgery_v2: SurgeryV2
    interv_merge: IntervMerge
    epochs: PositiveInt
    tangent: Numbers = ()
    scored: PositiveInt | None = None

    def check(self) -> None:
        for merger in self.trained:
            expected = f"must be one of {', '.join(self.mergers)}"
            require(merger in self.mergers, "field.trained", merger, expected)
        stream, expected = (
            self.rivals.stream,
            "must hold other samples than are scored: train, or unlabelled",
        )
        require(stream != "test_unlabelled", "field.rivals.stream", stream, expected)
        import reproduction.field.swudi  # noqa: F401 - registers a merger

        for method in self.mergers:
            for own in self.candidates(method):
                settings_of(method, own, f"field.mergers.{method}")

    def chosen_key(self, method: str) -> str:
        """Return the setting that is given as a list, of which validation samples choose one."""
        keys = (key for key in CHOSEN if isinstance(self.mergers[method].get(key), list))
        return next(keys, "")

    def candidates(self, method: str) -> list[dict[str, Any]]:
        """Return the settings of a method, one for every value that validation samples can choose."""
        own, key = dict(self.mergers[method]), self.chosen_key(method)
        return [{**own, key: value} for value in own[key]] if key else [own]

    def models(self, name: str, folder: Path) -> list[ModelSpec]:
        """Return what is scored of one merger."""
        if name == TANGENT:
            return [ModelSpec(f"{name}/{part}", folder / part, part, name) for part in PARTS]
        found = [ModelSpec(name, folder / "merged", "merged", name)]
        if self.pool in TEXT_POOLS:
            return found
        trained = TRAINED if name in self.trained else ()
        after = ("repair",) if name in WITHOUT_SVC else ("repair", "svc")
        for method in ("featcal", "featcal_auto", *OUTER, *INFERRED, *after, *trained):
            setting, seed = ("", "") if method == "svc" else (self.rivals.setting, self.seed)
            setting = AUTO if method == "featcal_auto" else setting
            corrects = name if method in (*OUTER, *INFERRED, *DEEP) else ""
            words, made = (method, name, setting, seed), folder / INFERRED.get(method, method)
            found.append(ModelSpec(f"{name}/{method}", made, *words, corrects=corrects))
        return found

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        """Return rows of every merger and of what follows it, and the settings chosen."""
        KEPT.clear()  # where the jobs run in this process, it may hold another study's
        names = [*self.mergers, *([TANGENT] if self.tangent else [])]
        longest_first = sorted(names, key=lambda name: (name not in self.trained, name != TANGENT))
        jobs = {name: (setup, self, name, folder / name) for name in longest_first}
        made = setup.context.run(f"field {self.key}", make, jobs)
        models = [model for name in names for model in self.models(name, folder / name)]
        scores = scoring.score(f"field {self.key}", setup, models, partial(evaluate, self))
        facts = {
            "chosen": {name: made[name]["chosen"] for name in self.mergers},
            "tried": {name: made[name]["tried"] for name in self.mergers if made[name]["tried"]},
        }
        rows = [row for model in models for row in scores[model.name]]
        cost = {name: made[name]["seconds"] for name in names}
        return StudyResult(rows, facts=facts, record={"cost": cost})


def kept(key: tuple[Any, ...], found: Callable[[], T]) -> T:
    """Return what is in KEPT by that name, computed where it is not."""
    if key not in KEPT:
        KEPT[key] = found()
    result: T = KEPT[key]
    return result


def timed(seconds: Seconds, part: str, function: Callable[[], T]) -> T:
    """Return the result of a function, its seconds added to a part."""
    start = time.perf_counter()
    result = function()
    seconds[part] = round(seconds.get(part, 0.0) + time.perf_counter() - start, 2)
    return result


def make(setup: Setup, study: FieldStudy, name: str, out: Path) -> dict[str, Any]:
    """Make one merger and what follows it, as folders; return its settings, those that were tried,
    and seconds.
    """
    seconds: Seconds = {}
    out.mkdir(parents=True)
    if name == TANGENT:
        from reproduction.field import tangent

        chosen, tried = tangent.make(setup, study, out, partial(timed, seconds))
    else:
        chosen, tried = merge(setup, study, name, out / "merged", partial(timed, seconds))
        if not setup.of_texts:
            repair(setup, study, name, out, seconds)
    return {"chosen": chosen, "tried": tried, "seconds": seconds}


def merge(
    setup: Setup, study: FieldStudy, name: str, out: Path, clock: Callable[..., Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Write the merged model; return its settings, and those tried with their accuracy on
    validation samples.
    """
    import featcal
    import reproduction.field.swudi  # noqa: F401 - registers a merger
    from featcal.merging.merge import open_merge
    from featcal.merging.registry import method_named

    key, candidates = study.chosen_key(name), study.candidates(name)
    needs, first = method_named(name).needs, candidates[0]
    given: dict[str, Any] = {"device": setup.context.device}
    if needs:
        given["batches"] = drawn(setup, study.drawn())
    if name == "adamerging":
        stream, seed = study.rivals.stream, study.seed
        draw = Draw(stream=stream, samples=None, batch=ADAPTED_BATCH, seed=seed)
        given["batches"] = streams(setup, draw)
    if "head" in needs:
        given["head"] = setup.heads
    base, experts = setup.base, setup.experts
    if not key:
        clock("merged", lambda: featcal.merge(name, base, experts, out=out, **given, **first))
        return first, []
    if key == "scale":  # merged once, whatever the number of scales
        opened = open_merge(name, base, experts, **given, **first)
        vectors = clock("merged", lambda: dict(opened.run()))

        def at_value(value: float, out: Path | None = None) -> Any:
            scaled = replace(opened, settings={**opened.settings, key: value})
            return scaled.finish(iter(vectors.items()), out)

    else:

        def at_value(value: float, **more: Any) -> Any:
            return featcal.merge(name, base, experts, **given, **{**first, key: value}, **more)

    def validated() -> dict[float, float]:
        if setup.of_texts:
            found = {}
            for value in (own[key] for own in candidates):
                model = ModelSpec("tried", out.parent / f"{key}-{value:g}", "merged")
                at_value(value, out=model.folder)
                scores = scoring.evaluate_model(setup, model, (), Selection("validation"))
                values = [one["value"] for one in scores["tried"].values()]
                found[value] = sum(values) / len(values)
            return found
        models = {own[key]: at_value(own[key]) for own in candidates}
        return averages(setup, models, partial(read, setup, study, "validation"))

    values = clock("choosing", validated)
    best = max(candidates, key=lambda own: (round(values[own[key]], 4), -own[key]))
    clock("merged", lambda: at_value(best[key], out=out))
    return best, [{**own, "value": round(values[own[key]], 4)} for own in candidates]


def repair(setup: Setup, study: FieldStudy, name: str, out: Path, seconds: Seconds) -> None:
    """Write everything that follows a merged model, out/merged."""
    from safetensors.torch import save_file

    import featcal
    from featcal.baselines.training import pool_features
    from reproduction.field.inner_adapters import inner_adapters
    from reproduction.field.prodistill import prodistill
    from reproduction.field.repair import all_samples, output_moments, renormalised
    from reproduction.field.svc import svc

    base, experts, device = setup.base, setup.experts, setup.context.device
    merged, rivals, seed, clock = out / "merged", study.rivals, study.seed, partial(timed, seconds)
    batches = drawn(setup, study.drawn(batch=rivals.batch))
    for method, settings in {"featcal": rivals.featcal, "featcal_auto": AUTO}.items():
        given: dict[str, Any] = {"base": base, "experts": experts, "batches": batches}
        given |= {"settings": settings, "device": device, "out": out / method, "resume": False}
        clock(method, partial(featcal.calibrate, merged, **given))
    projection, seen = setup.projection(), drawn(setup, rivals.draw("surgery", study.samples, seed))
    theirs, seconds["features"] = kept(
        ("features",), lambda: expert_features(experts, seen, projection, device)
    )
    pairs = clock("features", partial(pool_features, merged, theirs, seen, projection, device))
    for method in OUTER:
        adapters = clock(method, partial(getattr(rivals, method).fit, pairs, seed))
        adapters.save(out / method)
    save_file({task: pair.merged.mean(0) for task, pair in pairs.items()}, out / MEANS)
    one = kept(("one batch",), lambda: all_samples(drawn(setup, study.drawn())))
    wanted = kept(("moments",), lambda: output_moments(experts.values(), one, device))
    clock("repair", lambda: renormalised(merged, wanted, one, out=out / "repair", device=device))
    if name not in WITHOUT_SVC:
        least = SVC_AFTER.get(name, SVC_LEAST)
        clock(
            "svc", lambda: svc(merged, base, experts, least=least, out=out / "svc", device=device)
        )
    if name in study.trained:
        pieces = drawn(setup, study.drawn(batch=TRAINED_BATCH))
        more: dict[str, Any] = {"epochs": study.epochs, "seed": seed, "device": device}
        more["out"] = out / "prodistill"
        clock("prodistill", lambda: prodistill(merged, base, experts, pieces, **more))
        for method in DEEP:
            start = (getattr(study, method), merged, experts, seen, projection, seed, device)
            clock(method, partial(inner_adapters, *start)).save(out / method)


def expert_features(
    experts: Mapping[str, Path], seen: Mapping[str, Iterable[Any]], projection: Any, device: Any
) -> tuple[dict[str, Any], float]:
    """Return the experts' features of what adapters see, the same for every merger, and seconds."""
    import torch

    from featcal.baselines.training import as_module, pairs_of_several

    start, nobody = time.perf_counter(), torch.empty(0)  # of a pair only one side is needed
    found = {}
    for task, expert in experts.items():
        module = as_module(expert, device)
        pairs = pairs_of_several(task, {"": module}, nobody, seen[task], projection)
        found[task] = pairs[""].merged
    return found, time.perf_counter() - start


def drawn(setup: Setup, draw: Draw) -> dict[str, Any]:
    """Return batches of every task for a draw, whose samples are read once in a process."""
    one = draw.but(batch=1)
    samples: dict[str, Any] = kept(("drawn", one), lambda: streams(setup, one))
    return {task: replace(stream, size=draw.batch) for task, stream in samples.items()}


def read(setup: Setup, study: FieldStudy, split: str, task: str) -> Any:
    """Return samples that are scored, or that validate, read once in a process."""
    selection = Selection(split, study.scored if split == "test" else study.rows, study.seed)
    return kept((split, task), partial(selection.read, setup, task))


def evaluate(
    study: FieldStudy, setup: Setup, model: ModelSpec, corrected: Sequence[ModelSpec]
) -> dict[str, Counts]:
    """Return what a model gets right, alone and with adapters; with those inside it runs anew."""
    if setup.of_texts:
        return scoring.evaluate_model(setup, model, corrected)
    from safetensors.torch import load_file

    from featcal.baselines.adapters import Adapters
    from reproduction.field.inner_adapters import InnerAdapters

    test = partial(read, setup, study, "test")
    if model.upstream == TANGENT:
        from reproduction.field import tangent

        moved = partial(tangent.encoder, setup, model)
        return scoring.answers(setup, lambda task: {model.name: moved(task)}, test)
    encoder, deep = {model.name: setup.load(model.folder)}, dict[str, Path]()
    after: dict[str, Any] = {}
    for other in corrected:
        if other.method in DEEP:
            deep[other.name] = other.folder
        elif other.method in INFERRED:
            adapters, means = Adapters.load(other.folder), load_file(other.folder.parent / MEANS)
            after[other.name] = partial(inferred, adapters, means)
        else:
            after[other.name] = Adapters.load(other.folder).apply
    found = scoring.answers(setup, lambda _: encoder, test, after)
    for name, folder in deep.items():
        own, found[name] = InnerAdapters.load(folder), {}
        for task in setup.tasks:
            with own.inside(encoder[model.name], task):
                changed = {name: own.apply}
                judged = scoring.answers(setup, lambda _: encoder, test, changed, (task,))
            found[name] |= judged[name]
    return found


def inferred(
    adapters: "Adapters", means: Mapping[str, "Tensor"], _: str, rows: "Tensor"
) -> "Tensor":
    """Correct every feature by the adapter of the task whose mean is nearest; the head is told."""
    import torch

    tasks, result = sorted(means), torch.empty_like(rows)
    nearest = torch.cdist(rows, torch.stack([means[task] for task in tasks]).to(rows)).argmin(1)
    for number, task in enumerate(tasks):
        result[nearest == number] = adapters.apply(task, rows[nearest == number])
    return result
