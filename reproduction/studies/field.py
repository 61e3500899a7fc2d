"""Every merger from the same experts and samples: alone and with FeatCal, adapters, SVC and what
trains for minutes.

FeatCal is run twice: as the suite has it, and with its extensions. Settings that a method's source
chooses on validation samples are chosen there, by the merged model's own scores alone. Nobody has
seen what is scored. Seconds go to the run record.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import NonNegativeInt, PositiveInt

from featcal.merging.registry import settings_of
from featcal.settings import require
from reproduction.engine import score as scoring
from reproduction.engine.context import Setup
from reproduction.engine.samples import Selection, streams
from reproduction.engine.score import Counts, averages
from reproduction.engine.spec import ModelSpec
from reproduction.engine.study import Found
from reproduction.experiments import Draw, Numbers, Rivals, Study
from reproduction.field.settings import SVC_AFTER, SVC_LEAST, WITHOUT_SVC, IntervMerge, SurgeryV2
from reproduction.results import SCORES
from reproduction.studies.default import BEST

T = TypeVar("T")
OUTER = ("surgery", "prob_surgery")  # adapters after the last feature
DEEP = ("surgery_v2", "interv_merge")  # adapters inside the model
TRAINED = ("prodistill", *DEEP)  # what trains for minutes
TANGENT = "tangent"  # task arithmetic in the tangent space, in results
PARTS = ("merged", "expert")  # of it: the merged model, and each task's own expert as one row
TRAINED_BATCH = 16  # samples of each task in a step of ProDistill: the source's 128 of eight tasks
ADAPTED_BATCH = 16  # samples in a step of a merger that adapts without labels
Seconds = dict[str, float]  # by part
KEPT: dict[tuple[Any, ...], Any] = {}  # what a process has read or computed for every merger


class FieldStudy(Study):
    """Settings of the study.

    mergers: settings by method; validation samples choose one of a list of scales.
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
        for method in self.mergers:
            scales: Any = [{"scale": scale} for scale in self.scales(method)] or [{}]
            for more in scales:
                settings_of(method, {**self.settings(method), **more}, f"field.mergers.{method}")

    def scales(self, method: str) -> tuple[float, ...]:
        """Return the scales of which validation samples choose one; none where none is chosen."""
        given = self.mergers[method].get("scale")
        return tuple(given) if isinstance(given, list) else ()

    def settings(self, method: str) -> dict[str, Any]:
        """Return the settings of a method without a scale that is chosen."""
        own = dict(self.mergers[method])
        return {k: v for k, v in own.items() if k != "scale" or not self.scales(method)}

    def models(self, name: str, folder: Path) -> list[ModelSpec]:
        """Return what is scored of one merger."""
        if name == TANGENT:
            return [ModelSpec(f"{name}/{part}", folder / part, part, name) for part in PARTS]
        found = [ModelSpec(name, folder / "merged", "merged", name)]
        trained = TRAINED if name in self.trained else ()
        after = () if name in WITHOUT_SVC else ("svc",)
        for method in ("featcal", "featcal_best", *OUTER, *after, *trained):
            setting, seed = ("", "") if method == "svc" else (self.rivals.setting, self.seed)
            setting = "best" if method == "featcal_best" else setting
            corrects = name if method in (*OUTER, *DEEP) else ""
            words = (method, name, setting, seed)
            found.append(ModelSpec(f"{name}/{method}", folder / method, *words, corrects=corrects))
        return found

    def found(self, setup: Setup, folder: Path) -> Found:
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
            "preset": BEST,
            "tried": {name: made[name]["tried"] for name in self.mergers if made[name]["tried"]},
        }
        rows = [row for model in models for row in scores[model.name]]
        cost = {name: made[name]["seconds"] for name in names}
        return Found(rows, facts=facts, record={"cost": cost})


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
        repair(setup, study, name, out, seconds)
    return {"chosen": chosen, "tried": tried, "seconds": seconds}


def merge(
    setup: Setup, study: FieldStudy, name: str, out: Path, clock: Callable[..., Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Write the merged model; return its settings, and the scales tried with their accuracy on
    validation samples. It is merged once, whatever the number of scales.
    """
    import featcal
    from featcal.merging.merge import open_merge
    from featcal.merging.registry import method_named

    scales, settings, needs = study.scales(name), study.settings(name), method_named(name).needs
    given: dict[str, Any] = {"device": setup.context.device, **settings}
    if needs:
        given["batches"] = drawn(setup, study.drawn())
    if name == "adamerging":
        stream, seed = study.rivals.stream, study.seed
        draw = Draw(stream=stream, samples=None, batch=ADAPTED_BATCH, seed=seed)
        given["batches"] = streams(setup, draw)
    if "head" in needs:
        given["head"] = setup.heads
    base, experts = setup.base, setup.experts
    if not scales:
        clock("merged", lambda: featcal.merge(name, base, experts, out=out, **given))
        return settings, []
    at_scale = clock("merged", lambda: open_merge(name, base, experts, **given).at_scales())
    validation = partial(read, setup, study, "validation")
    models = {scale: at_scale(scale) for scale in scales}
    values = clock("choosing", partial(averages, setup, models, validation))
    best = max(scales, key=lambda scale: (round(values[scale], 4), -scale))
    clock("merged", lambda: at_scale(best, out=out))
    tried = [{**settings, "scale": scale, "value": round(values[scale], 4)} for scale in scales]
    return {**settings, "scale": best}, tried


def repair(setup: Setup, study: FieldStudy, name: str, out: Path, seconds: Seconds) -> None:
    """Write everything that follows a merged model, out/merged."""
    import featcal
    from featcal.baselines.training import pool_features
    from reproduction.field.inner_adapters import inner_adapters
    from reproduction.field.prodistill import prodistill
    from reproduction.field.svc import svc

    base, experts, device = setup.base, setup.experts, setup.context.device
    merged, rivals, seed, clock = out / "merged", study.rivals, study.seed, partial(timed, seconds)
    batches, best = (
        drawn(setup, study.drawn(batch=rivals.batch)),
        featcal.Calibration(**BEST),
    )
    for method, settings in {"featcal": rivals.featcal, "featcal_best": best}.items():
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
    from featcal.baselines.adapters import Adapters
    from reproduction.field.inner_adapters import InnerAdapters

    test = partial(read, setup, study, "test")
    if model.upstream == TANGENT:
        from reproduction.field import tangent

        moved = partial(tangent.encoder, setup, model)
        return scoring.answers(setup, lambda task: {model.name: moved(task)}, test)
    encoder, folders = {model.name: setup.load(model.folder)}, dict[str, Path]()
    for other in corrected:
        assert other.folder is not None  # only each task's own expert has none
        folders[other.name] = other.folder
    deep = [other.name for other in corrected if other.method in DEEP]
    after = {n: Adapters.load(folder).apply for n, folder in folders.items() if n not in deep}
    found = scoring.answers(setup, lambda _: encoder, test, after)
    for name in deep:
        own, found[name] = InnerAdapters.load(folders[name]), {}
        for task in setup.tasks:
            with own.inside(encoder[model.name], task):
                changed = {name: own.apply}
                judged = scoring.answers(setup, lambda _: encoder, test, changed, (task,))
            found[name] |= judged[name]
    return found
