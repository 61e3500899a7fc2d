"""The main comparison of a real model with experts of other training seeds.

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
from reproduction.experiments import AdapterWord, Counts, Setting, Study
from reproduction.prepare.experts import ExpertJob
from reproduction.prepare.hub import WEIGHTS
from reproduction.prepare.suite import FINE_TUNE, ChatRole, PhotoRole
from reproduction.results import EXPERT_SEEDS
from reproduction.stages.prepare import TEXTS, digest, make_experts


class ExpertSeedsStudy(Study):
    """Settings of the study.

    settings: of FeatCal and of adapters.   seeds: of the experts' trainings.
    """

    section = "expert_seeds"
    scores = EXPERT_SEEDS
    upstreams: tuple[str, ...]
    settings: tuple[AdapterWord | Setting, ...]
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
        suite, prepared, rows, jobs = setup.context.suite, setup.prepared, list[Row](), {}
        role: Any = setup.context.role(setup.role)
        if chat := isinstance(role, ChatRole):
            data, recipes = setup.texts, {task: role.fine_tuning(task) for task in setup.tasks}
        else:
            group = suite.photos if isinstance(role, PhotoRole) else suite.sentences
            recipes = dict.fromkeys(setup.tasks, group.fine_tune)
            data = setup.data
        shared = {name: prepared / name for name in ("base", TEXTS if chat else HEADS)}
        settings = [{task: own.model_dump() for task, own in recipes.items()}, self.seeds]
        files = [*([] if chat else [shared[HEADS]]), *sorted(data.glob("*/train.parquet"))]
        depends = digest(settings, setup.base / WEIGHTS, *files)
        store = setup.context.unfinished(f"expert_seeds-{setup.key}-{depends}")
        experts = {seed: store / f"seed{seed}" for seed in self.seeds}
        for (seed, own), (task, recipe) in product(experts.items(), recipes.items()):
            job = ExpertJob(task, FINE_TUNE, recipe, seed, suite.device)
            jobs[f"{task}, seed {seed}"] = (job, own / task)
        make_experts(setup, prepared, data, jobs)
        for seed in self.seeds:
            own, label = folder / f"seed{seed}", f"experts of seed {seed}"
            here, parts = setup.moved(own), {**shared, "experts": experts[seed]}
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

    parts: the base, experts, and heads or texts of the role and pool, by name.
    """
    setup.prepared.mkdir(parents=True)
    for name, target in parts.items():
        (setup.prepared / name).symlink_to(target)
    return make_and_score(setup, label, models, evaluate=evaluate)
