"""Stage `choices`: FeatCal on a language model with one of the paper's unstated choices changed at a time.

Scored on test texts, for the report only: no default was chosen by it.
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from featcal.storage.atomic import atomic_folder
from featcal.storage.results import write_json, write_scores
from reproduction.experiments.choices import ChoicesStudy
from reproduction.stages.calibrate_language import calibrate_one
from reproduction.stages.columns import CHOICES
from reproduction.stages.context import Context, load_context, pick, recorded
from reproduction.stages.evaluate_language import score
from reproduction.stages.scored import Scored
from reproduction.stages.trials import room
from reproduction.stages.workers import console, fan_out


def run(key: str) -> None:
    """Write outputs/<suite>/choices/<key>/choices.csv and its settings; no rows where the suite does not run it."""
    context = load_context()
    study: ChoicesStudy | None = pick("choices", context.experiments.studies["choices"], key)
    rows: list[dict[str, Any]] = []
    told: dict[str, Any] = {}
    with recorded(context, "choices", key), atomic_folder(context.layout.study("choices", key)) as folder:
        if study is None or not context.plays(study.role, study.pool):
            console.print(f"choices {key}: not run in suite {context.suite.name}")
        else:
            with room(context, "choices") as models:
                rows, told = list(varied(context, key, study, models)), {"study": asdict(study)}
        write_scores(folder / "choices.csv", rows, CHOICES)
        write_json(folder / "choices.settings.json", told)


def varied(context: Context, key: str, study: ChoicesStudy, folder: Path) -> Iterator[dict[str, Any]]:
    """Rows of the default at every seed and of every option, each a model of its own."""
    variants = list(study.variants())
    jobs = {v.name: (context, f"choices {key} {v.name}", study.run(v), v.seed, folder / v.name) for v in variants}
    for _ in fan_out(f"choices {key}", calibrate_one, jobs, context.suite.workers):
        pass
    models = [Scored(v.name, folder / v.name, "featcal", study.upstream, study.setting, v.seed) for v in variants]
    scores = score(context, f"choices {key}", study.role, study.pool, models)
    for v in variants:
        words = {"choice": v.choice, "option": v.option, "default": int(not v.choice)}
        yield from ({**row, **words} for row in scores[v.name])
