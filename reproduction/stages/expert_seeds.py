"""Stage `expert_seeds`: the main comparison of a sentence encoder again, with experts of other
trainings.

Experts of the first seed are scored by `evaluate`. Those of others are trained here and stay beside
the parts of unfinished stages, so that a change elsewhere trains none again; everything made from
them is forgotten when it is scored.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

from reproduction.experiments.comparisons import ExpertSeedsStudy
from reproduction.experiments.params import Experiments
from reproduction.experiments.runs import Pool
from reproduction.prepare.experts import HEADS
from reproduction.results import EXPERT_SEEDS
from reproduction.stages.calibrate import calibrate_one
from reproduction.stages.context import Context
from reproduction.stages.merge import merge_one
from reproduction.stages.prepare import make_sentence_experts, sentence_digest
from reproduction.stages.scored import scored
from reproduction.stages.scoring import Counts, evaluate_model, score_models
from reproduction.stages.study import Found, run_study
from reproduction.stages.trainings import train_all
from reproduction.stages.workers import fan_out


def run(key: str) -> None:
    """Write outputs/<suite>/expert_seeds/<key>/: expert_seeds.csv and its settings; no rows where
    the suite does not run it.
    """
    run_study("expert_seeds", key, found, EXPERT_SEEDS)


def found(context: Context, key: str, study: ExpertSeedsStudy, folder: Path) -> Found:
    """Rows of all models, made from the experts of one seed after the other."""
    experts, rows = trained(context, key, study), list[dict[str, Any]]()
    prepared, here = (
        context.layout.prepared(study.role, study.pool),
        fewer(context.experiments, study),
    )
    for seed in study.seeds:
        own, parts = folder / f"seed{seed}", {name: prepared / name for name in ("base", HEADS)}
        made = compared(
            context,
            f"experts of seed {seed}",
            study.role,
            study.pool,
            parts | {"experts": experts[seed]},
            here,
            own,
        )
        rows += [{**row, "expert_seed": seed} for row in made]
        rmtree(own)
    return Found(rows, told={"study": study.model_dump()})


def trained(context: Context, key: str, study: ExpertSeedsStudy) -> dict[int, Path]:
    """The folders of all experts of every seed, those that are finished from an earlier run."""
    layout, tasks = context.layout, context.suite.tasks_of(study.role, study.pool)
    prepared = layout.prepared(study.role, study.pool)
    of = sentence_digest(context, prepared / "base", study.role, study.pool, study.seeds)
    folders = {
        seed: layout.unfinished(f"expert_seeds-{key}-{of}") / f"seed{seed}" for seed in study.seeds
    }
    outs = {(task, seed): folder / task for seed, folder in folders.items() for task in tasks}
    make_sentence_experts(context, layout.data_of(study.role), prepared, outs)
    return folders


def compared(
    context: Context,
    label: str,
    role: str,
    pool: Pool,
    parts: Mapping[str, Path],
    experiments: Experiments,
    folder: Path,
    evaluate: Callable[..., dict[str, Counts]] = evaluate_model,
) -> list[dict[str, Any]]:
    """Rows of all models of some experiments, by the stages' own functions in a folder that stands
    for outputs/.

    parts: where base, experts and heads of the role and pool lie.
    """
    own = replace(context.layout, aside=folder)
    here = replace(context, layout=own, experiments=experiments)
    own.prepared(role, pool).mkdir(parents=True)
    for name, target in parts.items():
        (own.prepared(role, pool) / name).symlink_to(target)
    workers = context.suite.workers
    for _ in fan_out(
        f"{label}, merge", merge_one, {name: (here, name) for name in experiments.merge}, workers
    ):
        pass
    jobs = {}
    for name, run in experiments.calibrate.items():
        for draw in run.seeds:
            jobs[f"{name} seed {draw}"] = (
                here,
                f"{label} {name}",
                run,
                draw,
                own.calibrated(name, draw),
            )
    for _ in fan_out(f"{label}, calibrate", calibrate_one, jobs, workers):
        pass
    train_all(here, f"{label}, adapt", experiments.adapt)
    models, tasks = scored(here, role, pool), context.suite.tasks_of(role, pool)
    scores = score_models(evaluate, here, f"{label}, evaluate", role, pool, models, tasks)
    return [row for rows in scores.values() for row in rows]


def fewer(experiments: Experiments, study: ExpertSeedsStudy) -> Experiments:
    """Of a role and pool the mergers of the study and what is made from them, at the first draw of
    each.
    """
    words = (study.role, study.pool)
    merge = {
        k: run
        for k, run in experiments.merged_in(*words).items()
        if run.upstream in study.upstreams
    }
    calibrate = {
        k: run.but(seeds=run.seeds[:1])
        for k, run in experiments.calibrated_in(*words).items()
        if run.upstream in study.upstreams and run.setting in study.settings
    }
    adapt = {}
    for k, run in experiments.adapted_in(*words).items():
        if run.upstream in study.upstreams:
            assert run.settings is not None
            settings = {
                n: s.but(seeds=s.seeds[:1]) for n, s in run.settings.items() if n in study.settings
            }
            adapt[k] = run.but(settings=settings)
    return replace(experiments, merge=merge, calibrate=calibrate, adapt=adapt, multitask={})
