"""The main comparison of a sentence encoder with experts of other training seeds.

The stage `evaluate` scores experts of the first seed. Those of others are trained here and stay
with the parts of unfinished stages; what is made from them is deleted once it is scored.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

from reproduction.engine.context import HEADS, Setup
from reproduction.engine.make import make
from reproduction.engine.score import Row, score
from reproduction.engine.spec import specs
from reproduction.engine.study import Found
from reproduction.experiments import AdapterWord, Counts, Experiments, Study
from reproduction.results import EXPERT_SEEDS
from reproduction.stages.prepare import make_sentence_experts, sentence_digest


class ExpertSeedsStudy(Study):
    """Settings of the study.

    settings: of FeatCal and of adapters.   seeds: of the experts' trainings.
    """

    section = "expert_seeds"
    scores = EXPERT_SEEDS
    upstreams: tuple[str, ...]
    settings: tuple[AdapterWord, ...]
    seeds: Counts

    def found(self, setup: Setup, folder: Path) -> Found:
        """Return rows of all models, made from the experts of one seed after the other."""
        experts, rows = trained(setup, self), list[Row]()
        layout, here = setup.context.layout, selected(setup.context.experiments, self)
        prepared = layout.prepared(self.role, self.pool)
        for seed in self.seeds:
            parts = {name: prepared / name for name in ("base", HEADS)}
            own, label = folder / f"seed{seed}", f"experts of seed {seed}"
            made = compared(label, setup.moved(own, here), parts | {"experts": experts[seed]})
            rows += [{**row, "expert_seed": seed} for row in made]
            rmtree(own)
        return Found(rows)


def trained(setup: Setup, study: ExpertSeedsStudy) -> dict[int, Path]:
    """Return the folders of all experts of every seed, those that are missing trained."""
    layout, prepared = setup.context.layout, setup.base.parent
    digest = sentence_digest(setup, setup.base, study.seeds)
    store = layout.unfinished(f"expert_seeds-{setup.key}-{digest}")
    folders = {seed: store / f"seed{seed}" for seed in study.seeds}
    outs = {(task, seed): own / task for seed, own in folders.items() for task in setup.tasks}
    make_sentence_experts(setup, prepared, outs)
    return folders


def compared(
    label: str,
    setup: Setup,
    parts: Mapping[str, Path],
    evaluate: Callable[..., Any] | None = None,
) -> list[Row]:
    """Return rows of all models of a context whose outputs lie aside, by the stages' functions.

    parts: the base, experts and heads of the role and pool, by name.
    """
    prepared = setup.base.parent
    prepared.mkdir(parents=True)
    for name, target in parts.items():
        (prepared / name).symlink_to(target)
    models = specs(setup)
    make(label, setup, models)
    scores = score(f"{label} score", setup, models, evaluate)
    return [row for rows in scores.values() for row in rows]


def selected(experiments: Experiments, study: ExpertSeedsStudy) -> Experiments:
    """Return the study's mergers and what is made from them, at the first draw of each."""
    words, upstreams = (study.role, study.pool), study.upstreams

    def own(runs: Mapping[str, Any]) -> dict[str, Any]:
        return {key: run for key, run in runs.items() if run.upstream in upstreams}

    calibrate = {
        key: run.but(seeds=run.seeds[:1])
        for key, run in own(experiments.calibrated_in(*words)).items()
        if run.setting in study.settings
    }
    adapt = {}
    for key, run in own(experiments.adapted_in(*words)).items():
        settings = {
            name: setting.but(seeds=setting.seeds[:1])
            for name, setting in run.settings.items()
            if name in study.settings
        }
        adapt[key] = run.but(settings=settings)
    merge = own(experiments.merged_in(*words))
    return replace(experiments, merge=merge, calibrate=calibrate, adapt=adapt, multitask={})
