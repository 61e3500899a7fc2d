"""The main comparison of a real model with experts of other training seeds, trained here."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from reproduction.engine.context import Setup
from reproduction.engine.spec import ModelSpec, specs
from reproduction.engine.study import StudyResult, score_parts
from reproduction.experiments import CHAT_POOL, AdapterSettingName, Counts, Setting, Study
from reproduction.prepare.hub import WEIGHTS
from reproduction.results import EXPERT_SEEDS, Row
from reproduction.stages.prepare import digest, make_experts, recipes_of


class ExpertSeedsStudy(Study):
    """Settings; `settings` are FeatCal's and the adapters', `seeds` the experts'."""

    scores = EXPERT_SEEDS
    upstreams: tuple[str, ...]
    settings: tuple[AdapterSettingName | Setting, ...]
    seeds: Counts

    def models(self, setup: Setup) -> Iterable[ModelSpec]:
        """Return the references, the study's mergers, and the first draw of what follows them."""
        first: dict[Any, ModelSpec] = {}
        for model in (model for model in specs(setup) if model.method != "multitask"):
            if model.upstream in ("", *self.upstreams) and model.setting in ("", *self.settings):
                first.setdefault((model.upstream, model.method, model.setting), model)
        return first.values()

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        chat, rows = setup.pool == CHAT_POOL, list[Row]()
        data, recipes = setup.texts if chat else setup.data, recipes_of(setup, setup.tasks)
        settings = [{task: recipe.model_dump() for task, recipe in recipes.items()}, self.seeds]
        files = [*([] if chat else [setup.heads]), *sorted(data.glob("*/train.parquet"))]
        depends = digest(settings, setup.base / WEIGHTS, *files)
        store = setup.context.unfinished(f"expert_seeds-{setup.key}-{depends}")
        folders = {seed: store / f"seed{seed}" for seed in self.seeds}
        make_experts(setup, setup.prepared, data, recipes, folders)
        for seed, experts in folders.items():
            args = (setup, folder / f"seed{seed}", {"experts": experts}, self.models)
            rows += score_parts(f"experts of seed {seed}", *args, columns={"expert_seed": seed})
        return StudyResult(rows)
