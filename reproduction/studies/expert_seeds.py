"""The main comparison of a sentence encoder with experts of other training seeds.

The stage `evaluate` scores experts of the first seed. Those of others are trained here and stay
with the parts of unfinished stages; what is made from them is deleted once it is scored.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from shutil import rmtree
from typing import Any

from reproduction.engine.context import HEADS, Setup
from reproduction.engine.score import Row
from reproduction.engine.spec import ModelSpec, specs
from reproduction.engine.study import StudyResult, make_and_score
from reproduction.experiments import AdapterWord, Counts, Study
from reproduction.prepare.experts import ExpertJob
from reproduction.prepare.hub import WEIGHTS
from reproduction.prepare.suite import FINE_TUNE
from reproduction.results import EXPERT_SEEDS
from reproduction.stages.prepare import digest, make_experts


class ExpertSeedsStudy(Study):
    """Settings of the study.

    settings: of FeatCal and of adapters.   seeds: of the experts' trainings.
    """

    section = "expert_seeds"
    scores = EXPERT_SEEDS
    upstreams: tuple[str, ...]
    settings: tuple[AdapterWord, ...]
    seeds: Counts

    def models(self, setup: Setup) -> list[ModelSpec]:
        """Return the references, the study's mergers, and the first draw of what follows them."""
        first: dict[Any, ModelSpec] = {}
        for model in specs(setup):
            mergers, settings = ("", *self.upstreams), ("", *self.settings)
            wanted = model.upstream in mergers and model.setting in settings
            if wanted and model.method != "multitask":
                first.setdefault((model.upstream, model.method, model.setting), model)
        return list(first.values())

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        """Return rows of all models, made from the experts of one seed after the other."""
        suite = setup.context.suite
        prepared, data = setup.prepared, setup.data
        recipe, rows, jobs = suite.sentences.fine_tune, list[Row](), {}
        texts = sorted(data.glob("*/train.parquet"))
        settings = [setup.tasks, recipe.model_dump(), self.seeds]
        depends = digest(settings, prepared / HEADS, setup.base / WEIGHTS, *texts)
        store = setup.context.unfinished(f"expert_seeds-{setup.key}-{depends}")
        experts = {seed: store / f"seed{seed}" for seed in self.seeds}
        for (seed, own), task in product(experts.items(), setup.tasks):
            job = ExpertJob(task, FINE_TUNE, recipe, seed, suite.device)
            jobs[f"{task}, seed {seed}"] = (job, own / task)
        make_experts(setup, prepared, data, jobs)
        for seed in self.seeds:
            parts = {name: prepared / name for name in ("base", HEADS)}
            own, label = folder / f"seed{seed}", f"experts of seed {seed}"
            here, parts["experts"] = setup.moved(own), experts[seed]
            made = compared(label, here, parts, self.models(here))
            rows += [{**row, "expert_seed": seed} for row in made]
            rmtree(own)
        return StudyResult(rows)


def compared(
    label: str,
    setup: Setup,
    parts: Mapping[str, Path],
    models: Sequence[ModelSpec],
    evaluate: Callable[..., Any] | None = None,
) -> list[Row]:
    """Make models whose outputs lie aside, and return their rows.

    parts: the base, experts and heads of the role and pool, by name.
    """
    setup.prepared.mkdir(parents=True)
    for name, target in parts.items():
        (setup.prepared / name).symlink_to(target)
    return make_and_score(setup, label, models, evaluate=evaluate)
