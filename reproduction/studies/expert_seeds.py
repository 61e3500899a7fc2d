"""The main comparison of a real model with experts of other training seeds, trained here."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from shutil import rmtree
from typing import Any

from reproduction.engine.context import Setup
from reproduction.engine.score import Evaluate, Row
from reproduction.engine.spec import ModelSpec, specs
from reproduction.engine.study import StudyResult, make_and_score
from reproduction.experiments import CHAT_POOL, AdapterWord, Counts, Setting, Study
from reproduction.prepare.experts import HEADS, ExpertJob
from reproduction.prepare.hub import WEIGHTS
from reproduction.prepare.suite import FINE_TUNE
from reproduction.results import EXPERT_SEEDS
from reproduction.stages.prepare import TEXTS, digest, make_experts, recipes_of


class ExpertSeedsStudy(Study):
    """Settings; `settings` are FeatCal's and the adapters', `seeds` the experts'."""

    section = "expert_seeds"
    scores = EXPERT_SEEDS
    upstreams: tuple[str, ...]
    settings: tuple[AdapterWord | Setting, ...]
    seeds: Counts

    def models(self, setup: Setup) -> Iterable[ModelSpec]:
        """Return the references, the study's mergers, and the first draw of what follows them."""
        first: dict[Any, ModelSpec] = {}
        for model in (model for model in specs(setup) if model.method != "multitask"):
            if model.upstream in ("", *self.upstreams) and model.setting in ("", *self.settings):
                first.setdefault((model.upstream, model.method, model.setting), model)
        return first.values()

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        prepared, chat, rows = setup.prepared, setup.pool == CHAT_POOL, list[Row]()
        data, recipes = setup.texts if chat else setup.data, recipes_of(setup, setup.tasks)
        shared = {name: prepared / name for name in ("base", TEXTS if chat else HEADS)}
        settings = [{task: own.model_dump() for task, own in recipes.items()}, self.seeds]
        files = [*([] if chat else [shared[HEADS]]), *sorted(data.glob("*/train.parquet"))]
        depends = digest(settings, setup.base / WEIGHTS, *files)
        store, jobs = setup.context.unfinished(f"expert_seeds-{setup.key}-{depends}"), {}
        for seed, (task, recipe) in product(self.seeds, recipes.items()):
            job = ExpertJob(task, FINE_TUNE, recipe, seed, setup.context.suite.device)
            jobs[f"{task}, seed {seed}"] = (job, store / f"seed{seed}" / task)
        make_experts(setup, prepared, data, jobs)
        for seed in self.seeds:
            aside, parts = folder / f"seed{seed}", {**shared, "experts": store / f"seed{seed}"}
            made = compared(f"experts of seed {seed}", setup, aside, parts, self.models)
            rows += [{**row, "expert_seed": seed} for row in made]
            rmtree(aside)
        return StudyResult(rows)


def compared(
    label: str,
    setup: Setup,
    aside: Path,
    parts: Mapping[str, Path],
    models: Callable[[Setup], Iterable[ModelSpec]],
    evaluate: Evaluate | None = None,
) -> list[Row]:
    """Make models whose outputs lie aside, from these parts of the role; return their rows."""
    here = replace(setup, context=replace(setup.context, aside=aside))
    here.prepared.mkdir(parents=True)
    for name, target in parts.items():
        (here.prepared / name).symlink_to(target)
    return make_and_score(here, label, list(models(here)), evaluate=evaluate)
