"""Stage `choices`: FeatCal on a language model with one of the paper's unstated choices changed at
a time.

Scored on test texts, for the report only: no default was chosen by it.
"""

from pathlib import Path

from reproduction.experiments.choices import ChoicesStudy
from reproduction.results import CHOICES
from reproduction.stages.calibrate import calibrate_one
from reproduction.stages.context import Context
from reproduction.stages.scored import Scored
from reproduction.stages.scoring import score
from reproduction.stages.study import Found, run_study
from reproduction.stages.workers import fan_out


def run(key: str) -> None:
    """Write outputs/<suite>/choices/<key>/choices.csv and its settings; no rows where the suite
    does not run it.
    """
    run_study("choices", key, varied, CHOICES)


def varied(context: Context, key: str, study: ChoicesStudy, folder: Path) -> Found:
    """Rows of the default at every seed and of every option, each a model of its own."""
    variants = list(study.variants())
    jobs = {
        v.name: (context, f"choices {key} {v.name}", study.run(v), v.seed, folder / v.name)
        for v in variants
    }
    for _ in fan_out(f"choices {key}", calibrate_one, jobs, context.suite.workers):
        pass
    models = [
        Scored(v.name, folder / v.name, "featcal", study.upstream, study.setting, v.seed)
        for v in variants
    ]
    scores = score(context, f"choices {key}", study.role, study.pool, models)
    words = {
        v.name: {"choice": v.choice, "option": v.option, "default": int(not v.choice)}
        for v in variants
    }
    rows = [{**row, **words[v.name]} for v in variants for row in scores[v.name]]
    return Found(rows, told={"study": study.model_dump()})
