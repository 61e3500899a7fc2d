"""Stage `cost`: time, memory and energy of each way to calibrate, alone on the machine, and
adapters scored while they train.

What was measured varies from run to run and goes to the run record; cost.csv holds the scores.
"""

from pathlib import Path
from typing import Any

from reproduction.experiments.comparisons import CostStudy
from reproduction.results import AUDIT
from reproduction.stages.context import Context
from reproduction.stages.processes import alone
from reproduction.stages.rivals import METHODS, Method, measure, merged_model, step_folder
from reproduction.stages.scored import Scored
from reproduction.stages.scoring import score
from reproduction.stages.study import Found, run_study


def run(key: str) -> None:
    """Write outputs/<suite>/cost/<key>/cost.csv; no rows where the suite does not run it."""
    run_study("cost", key, found, AUDIT, settings=False)


def found(context: Context, key: str, study: CostStudy, folder: Path) -> Found:
    """Scores of the adapters as published, and what every rival cost."""
    threads = (
        context.suite.workers or None
    )  # nothing runs beside it, so it has the cores that workers share elsewhere
    cost = measured(context, study, key, folder, threads)
    record = {"cost": cost, "at_once": 1, "threads": threads, "settings": study.model_dump()}
    return Found(audited(context, study, key, folder), record=record)


def rivals_of(study: CostStudy) -> list[Method]:
    """FeatCal, both adapters with kept features and, where they are to be audited, both as
    published.
    """
    kept = [Method(method, study.samples, study.seed) for method in METHODS]
    if not study.audit:
        return kept
    return kept + [
        Method(method, study.samples, study.seed, "each_step")
        for method in METHODS
        if method != "featcal"
    ]


def measured(
    context: Context, study: CostStudy, key: str, folder: Path, threads: int | None
) -> list[dict[str, Any]]:
    """What each rival cost, one after the other; the adapters as published leave those to be
    audited behind.
    """
    jobs = {
        rival.name: (
            context,
            study,
            rival,
            folder / rival.name,
            study.audit if rival.encode == "each_step" else (),
        )
        for rival in rivals_of(study)
    }
    return [cost for _, cost in alone(f"cost {key}", measure, jobs, 1, threads)]


def audited(context: Context, study: CostStudy, key: str, folder: Path) -> list[dict[str, Any]]:
    """Scores of the adapters as published after every number of steps that is asked for."""
    kept = [
        (rival, step)
        for rival in rivals_of(study)
        if rival.encode == "each_step"
        for step in study.audit
    ]
    models = [Scored("merged", merged_model(context.layout, study), "merged", study.upstream)]
    models += [
        rival.scored(study, step_folder(folder / rival.name, step), f"{rival.name} {step}")
        for rival, step in kept
    ]
    scores = score(context, f"evaluate cost {key}", study.role, study.pool, models)
    named = {f"{rival.name} {step}": rival.row_keys(study) | {"step": step} for rival, step in kept}
    return [row | words for name, words in named.items() for row in scores[name]]
