"""Specify models: how each is made, its folder, and the columns of its rows."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from featcal.files import atomic_folder
from reproduction.engine.context import Setup
from reproduction.experiments import (
    ADAPTERS,
    ANCHOR,
    CHAT_POOL,
    DOMAIN_POOL,
    TRAINED_ADAPTERS,
    Reading,
    SampleDraw,
)


@dataclass(frozen=True)
class ModelSpec:
    """A model, or adapters after one.

    name:     unique among the models that are made or scored together.
    folder:   of the model or of its adapters; None: each task's own expert.
    method, upstream, setting, seed: keys of its rows; `upstream` is the merger.
    settings: of FeatCal, of an adapter or of a merger; the factor of a rescaled model.
    draw, reading: the samples that it is made from.
    corrects: name of the model that adapters correct.   columns: more columns of its rows.
    """

    name: str
    folder: Any  # Path, or None
    method: str
    upstream: str = ""
    setting: str = ""
    seed: int | str = ""
    settings: Any = None
    draw: Any = None  # SampleDraw, or None
    reading: Reading | None = None
    corrects: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def row_keys(self) -> dict[str, Any]:
        """Return the columns that name the model in its rows."""
        names = ("upstream", "method", "setting", "seed")
        return {name: getattr(self, name) for name in names} | dict(self.columns)

    def but(self, **changes: Any) -> "ModelSpec":
        return replace(self, **changes)


def specs(setup: Setup) -> list[ModelSpec]:
    """Return every model of params.yaml that is scored, in the order of the results file."""
    models = (*references(setup), *merged(setup), *calibrated(setup), *adapted(setup))
    return [*models, *(anchors(setup) if setup.of_texts else ())]


def references(setup: Setup) -> Iterator[ModelSpec]:
    """Yield base, experts and multi-task model; experts are a row each where they answer all tests."""
    yield ModelSpec("base", setup.base, "base")
    if setup.pool in (DOMAIN_POOL, CHAT_POOL):
        for name, folder in setup.experts.items():
            yield ModelSpec(f"expert/{name}", folder, "expert", setting=name)
    if setup.pool != DOMAIN_POOL:  # every task has an expert; together one row
        yield ModelSpec("expert", None, "expert")
    if setup.context.experiments.multitask.get(setup.key):
        yield ModelSpec("multitask", setup.folder("multitask"), "multitask")


def merged(setup: Setup) -> Iterator[ModelSpec]:
    runs = setup.context.experiments.merged_in(setup.role, setup.pool)
    for key, run in runs.items():
        folder = setup.merged(run.upstream)
        yield ModelSpec(key, folder, "merged", run.upstream, settings=run, draw=run.draw)


def calibrated(setup: Setup) -> Iterator[ModelSpec]:
    runs = setup.context.experiments.calibrated_in(setup.role, setup.pool)
    for key, run, seed in ((k, r, seed) for k, r in runs.items() for seed in r.seeds):
        folder = setup.folder("calibrated", f"{run.upstream}-{run.setting}", f"seed{seed}")
        draw = SampleDraw(stream="train", samples=run.samples, batch=run.batch, seed=seed)
        arguments = ("featcal", run.upstream, run.setting, seed, run.calibration, draw, run.reading)
        yield ModelSpec(f"{key}/{seed}", folder, *arguments)


def adapted(setup: Setup) -> Iterator[ModelSpec]:
    runs = setup.context.experiments.adapted_in(setup.role, setup.pool)
    for key, run in runs.items():
        out = setup.folder("adapted", f"{run.upstream}-{run.method}")
        for setting, entry in run.settings.items():
            for seed in entry.seeds:
                arguments = (run.method, run.upstream, setting, seed, entry.training)
                name, draw = f"{key}/{setting}/{seed}", entry.draw.but(seed=seed)
                folder = out / setting / f"seed{seed}"
                yield ModelSpec(name, folder, *arguments, draw, corrects=run.merged)


def anchors(setup: Setup) -> Iterator[ModelSpec]:
    """Yield base + ρ (merged − base), the anchor of FeatCal at every setting."""
    runs = setup.context.experiments.calibrated_in(setup.role, setup.pool)
    for key, run in runs.items():
        if run.setting != "paper_8b":  # has the ρ of `paper`, and so its anchor
            folder = setup.folder("calibrated", f"{run.upstream}-{run.setting}", ANCHOR)
            arguments, factor = (ANCHOR, run.upstream, run.setting), run.calibration.anchor_blend
            yield ModelSpec(f"{key}/{ANCHOR}", folder, *arguments, settings=factor)


@contextmanager
def replacing(
    setup: Setup, verb: str, kind: str, models: Iterable[ModelSpec]
) -> Iterator[list[ModelSpec]]:
    """Yield models with hidden folders, which replace those of the kind once all are made."""
    out, planned = setup.folder(kind), list(models) if setup.available else []
    if not planned:
        yield []
        setup.context.not_run(f"{verb} {setup.key}", out)
        return
    with atomic_folder(out) as hidden:
        yield [m.but(folder=hidden / m.folder.relative_to(out)) for m in planned if m.folder]


def merged_model(setup: Setup, upstream: str) -> ModelSpec:
    """Return the merged model that a study starts from."""
    run, folder = setup.context.experiments.merge[f"{setup.key}-{upstream}"], setup.merged(upstream)
    return ModelSpec("merged", folder, "merged", upstream, settings=run, draw=run.draw)


def featcal_at(study: Any, folder: Path, name: str, settings: Any, **changes: Any) -> ModelSpec:
    """Return FeatCal at some settings. changes: replace the study's own values."""
    names = ("upstream", "setting", "seed")
    fields = {n: changes.pop(n) if n in changes else getattr(study, n) for n in names}
    fields |= {"draw": changes.pop("draw", None) or study.featcal_draw(), **changes}
    return ModelSpec(name, folder / name, "featcal", settings=settings, **fields)


def compared_models(
    study: Any,
    folder: Path,
    *methods: str,
    streams: Iterable[str] = ("",),
    suffix: str = "",
    **changes: Any,
) -> list[ModelSpec]:
    """Return adapters on each stream ("": the study's) and FeatCal, each in a folder of its own.

    FeatCal's settings are the comparison's and, if the study has them, the paper's.
    suffix: of their names.   changes: replace the study's own values.
    """
    names = ("upstream", "samples", "seed")
    upstream, samples, seed = (changes.pop(n) if n in changes else getattr(study, n) for n in names)
    papers = getattr(study, "paper", None) or getattr(study, "at_papers", None)
    main, models = study.comparison, []
    for stream, method in product(streams, methods):
        setting = main.setting + ("_train" if stream == "train" else "")
        at_settings = {setting: getattr(main, method, None) or ADAPTERS[method]()}
        if method == "featcal" and papers:
            at_settings["paper"] = papers
        fields = {"draw": main.draw(method, samples, seed, stream)}
        fields |= {"corrects": "" if method == "featcal" else "merged", **changes}
        for setting, settings in at_settings.items():
            name = f"{upstream}-{method}-{setting}-{samples}-{seed}{suffix}"
            keys = (method, upstream, setting, seed)
            models.append(ModelSpec(name, folder / name, *keys, settings, **fields))
    return models


def main_models(study: Any, setup: Setup) -> list[ModelSpec]:
    """Return the references and a study's mergers, with FeatCal at both settings and adapters."""
    mergers = [model for model in merged(setup) if model.upstream in study.upstreams]
    models = [model for model in references(setup) if model.method != "multitask"] + mergers
    folder = setup.folder("studied")
    for model in mergers:
        models += compared_models(study, folder, "featcal", upstream=model.upstream)
    for model in mergers:
        shared = {"upstream": model.upstream, "corrects": model.name}
        models += compared_models(study, folder, *TRAINED_ADAPTERS, **shared)
    return models
