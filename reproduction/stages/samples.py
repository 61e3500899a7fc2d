"""Stage `samples`: FeatCal, Surgery and ProbSurgery with 8 to 512 images of each task, what they
reach and what they cost.

First every calibration, each alone in a process of its own, then one pass over the test images for
all of them; no time and no memory holds any evaluation. The models themselves are not kept.
"""

from pathlib import Path
from typing import Any

from reproduction.experiments.comparisons import SamplesStudy
from reproduction.results import SAMPLES, SEEN
from reproduction.stages.context import Context
from reproduction.stages.processes import alone
from reproduction.stages.rivals import METHODS, Method, measure, merged_model
from reproduction.stages.scored import Scored
from reproduction.stages.scoring import score
from reproduction.stages.seen import seen_rows
from reproduction.stages.study import Found, run_study


def run(key: str) -> None:
    """Write outputs/<suite>/samples/<key>/: samples.csv, .correct.csv and .seen.csv; no rows where
    the suite does not run it.

    Costs go to the run record.
    """
    run_study("samples", key, found, SAMPLES, {"samples.seen": SEEN}, settings=False)


def found(context: Context, key: str, study: SamplesStudy, folder: Path) -> Found:
    """Scores, the test images that were seen, and costs."""
    rows, cost = study_rows(context, study, key, folder)
    draws = [study.rivals.draw("surgery", n, seed) for n in study.samples for seed in study.seeds]
    seen = seen_rows(context, study.role, study.pool, draws, rows)
    at_once, threads = side_by_side(context)
    record = {"cost": cost, "at_once": at_once, "threads": threads, "settings": study.model_dump()}
    return Found(rows, {"samples.seen": seen}, record=record)


def side_by_side(context: Context) -> tuple[int, int | None]:
    """How many calibrations run at once, and with how many threads each; None is torch's own
    number.
    """
    workers = context.suite.workers
    return (workers, 1) if workers else (1, None)


def rivals_of(study: SamplesStudy) -> list[Method]:
    """Every method at every number of images and every seed; the longest first, so that no core
    waits at the end.
    """
    chosen = [
        Method(method, n, seed) for method in METHODS for n in study.samples for seed in study.seeds
    ]
    return sorted(chosen, key=lambda rival: -rival.samples)


def study_rows(
    context: Context, study: SamplesStudy, key: str, folder: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Scores of the merged model and of every rival, and what each rival cost."""
    chosen = rivals_of(study)
    folders = {rival.name: folder / f"{number:03d}" for number, rival in enumerate(chosen)}
    jobs = {rival.name: (context, study, rival, folders[rival.name]) for rival in chosen}
    costs = dict(alone(f"samples {key}", measure, jobs, *side_by_side(context)))
    merged = Scored("merged", merged_model(context.layout, study), "merged", study.upstream)
    models = [merged, *(rival.scored(study, folders[rival.name]) for rival in chosen)]
    budgets = {"merged": 0} | {rival.name: rival.samples for rival in chosen}
    scores = score(context, f"evaluate samples {key}", study.role, study.pool, models)
    order = ("merged", *METHODS)
    rows = [
        row | {"samples": budgets[model.name]}
        for model in sorted(
            models, key=lambda model: (order.index(model.method), budgets[model.name], model.seed)
        )
        for row in scores[model.name]
    ]
    return rows, [
        costs[rival.name]
        for rival in sorted(chosen, key=lambda r: (METHODS.index(r.method), r.samples, r.seed))
    ]
