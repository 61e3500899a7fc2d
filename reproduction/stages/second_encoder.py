"""Stage `second_encoder`: the main comparison of a sentence encoder again, with another encoder on
the same texts.

Its experts stay beside the parts of unfinished stages, so that a run that was interrupted goes on;
all that is made from them is forgotten when it is scored.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

from reproduction.experiments.comparisons import SecondEncoderStudy
from reproduction.experiments.params import Experiments
from reproduction.experiments.runs import AdapterSetting, AdaptRun, CalibrateRun
from reproduction.prepare.experts import HEADS, model_folder
from reproduction.prepare.suite import FineTuneSentences
from reproduction.results import SCORES
from reproduction.stages.context import Context
from reproduction.stages.expert_seeds import compared
from reproduction.stages.prepare import (
    FIRST,
    make_sentence_experts,
    make_sentence_heads,
    sentence_digest,
)
from reproduction.stages.scoring import drawn, evaluate_model
from reproduction.stages.study import Found, run_study


def run(key: str) -> None:
    """Write outputs/<suite>/second_encoder/<key>/: scores and settings; no rows where the suite
    does not run it.
    """
    run_study("second_encoder", key, found, SCORES, plays=Context.knows)


def found(context: Context, key: str, study: SecondEncoderStudy, folder: Path) -> Found:
    """Rows of base, experts, merged and calibrated models, and of adapters."""
    store, experiments = made(context, key, study), run_here(context.experiments, study)
    parts = {name: store / name for name in ("base", "experts", HEADS)}
    evaluate = partial(evaluate_model, most=partial(drawn, study.scored, study.seed))
    rows = compared(
        context,
        f"second encoder {key}",
        study.role,
        study.pool,
        parts,
        experiments,
        folder / "outputs",
        evaluate,
    )
    return Found(rows, told={"study": study.model_dump()})


def made(context: Context, key: str, study: SecondEncoderStudy) -> Path:
    """A folder with base/, heads.safetensors and experts/<task>/, those that are finished from an
    earlier run.
    """
    layout, texts, tasks = (
        context.layout,
        context.layout.data_of(study.role),
        context.suite.tasks_of(study.role, study.pool),
    )
    encoder = model_folder(layout.root, study.model, layout.pins)
    recipe = FineTuneSentences.from_mapping(study.fine_tune, f"second_encoder.{key}.fine_tune")
    suite = context.suite.but(sentences=context.suite.sentences.but(fine_tune=recipe))
    here = replace(context, suite=suite)
    store = layout.unfinished(
        f"second_encoder-{key}-{sentence_digest(here, encoder, study.role, study.pool, (FIRST,))}"
    )
    make_sentence_heads(here, encoder, texts, tasks, store)
    make_sentence_experts(
        here, texts, store, {(task, FIRST): store / "experts" / task for task in tasks}
    )
    return store


def run_here(experiments: Experiments, study: SecondEncoderStudy) -> Experiments:
    """The mergers of the study, each with FeatCal at both settings and both adapters behind it."""
    role, pool, seeds, rivals = study.role, study.pool, (study.seed,), study.rivals
    merge = {
        key: one
        for key, one in experiments.merged_in(role, pool).items()
        if one.upstream in study.upstreams
    }
    calibrate, adapt = {}, {}
    for key, one in merge.items():
        for setting, calibration in ((rivals.setting, rivals.featcal), ("paper", study.paper)):
            own = CalibrateRun(
                role=role,
                pool=pool,
                upstream=one.upstream,
                setting=setting,
                calibration=calibration,
                samples=study.samples,
                batch=rivals.batch,
                seeds=seeds,
            )
            calibrate[f"{key}-{setting}"] = own
        for method in ("surgery", "prob_surgery"):
            draw = rivals.draw(method, study.samples, study.seed)
            settings = {
                rivals.setting: AdapterSetting(
                    training=getattr(rivals, method), draw=draw, seeds=seeds
                )
            }
            adapt[f"{key}-{method}"] = AdaptRun(
                role=role, pool=pool, upstream=one.upstream, method=method, settings=settings
            )
    return replace(experiments, merge=merge, calibrate=calibrate, adapt=adapt, multitask={})
