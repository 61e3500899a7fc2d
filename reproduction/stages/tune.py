"""Stage `tune`: λ, ρ and α of FeatCal chosen without labels, and every candidate scored on test
samples.

The scores are for the report only: the search sees the divergence on training samples held out from
each calibration, as `featcal tune` does. What is left out here is the public function's loop:
candidates are calibrated side by side in the workers.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from featcal.settings import Calibration
from reproduction.experiments.tunings import TuneStudy
from reproduction.results import TUNE
from reproduction.stages.context import Context
from reproduction.stages.scored import Scored
from reproduction.stages.scoring import score
from reproduction.stages.study import Found, run_study
from reproduction.stages.workers import fan_out

REFERENCE = "reference"  # origin of the suite's own settings, which are no candidate
Job = tuple[Context, TuneStudy, Calibration | None, Path]  # None: the path of every site


def run(key: str) -> None:
    """Write outputs/<suite>/tune/<key>/tune.csv and its settings; no rows where the suite does not
    run it.
    """
    run_study("tune", key, searched, TUNE)


def searched(context: Context, key: str, study: TuneStudy, folder: Path) -> Found:
    """Rows of every candidate and of the reference, the study with the λ of every site's path, and
    seconds of every part.
    """
    from featcal.tuning.search import Candidate, Search, best, proposals, rounds

    search, known = (
        Search(trials=study.trials, holdout=study.holdout, seed=study.seed, n_jobs=study.at_once),
        list[Candidate](),
    )
    workers = context.suite.workers
    first: dict[str, Job] = {"path": (context, study, None, folder / "path")}
    if study.suite is not None:  # beside the path, which one core is busy with
        first[REFERENCE] = (context, study, study.suite, folder / REFERENCE)
    begun = dict(fan_out(f"tune {key}", part, first, workers))
    path, seconds = begun["path"]
    cost = {"path": seconds}
    for numbers in rounds(search):
        proposed = {
            str(one.number): one for one in proposals(search, numbers, study.paper, path, known)
        }
        jobs: dict[str, Job] = {
            n: (context, study, one.settings, folder / n) for n, one in proposed.items()
        }
        for number, (divergence, seconds) in fan_out(f"tune {key}", part, jobs, workers):
            one = proposed[number]
            known.append(Candidate(one.number, one.origin, one.settings, divergence))
            cost[number] = seconds
        known.sort(key=lambda one: one.number)
    chosen = best(known).number
    if study.suite is not None:
        known.append(Candidate(len(known), "search", study.suite, begun[REFERENCE][0]))
    rows = list(scored_rows(context, key, study, known, chosen, folder))
    return Found(rows, told={"study": study.model_dump(), "path": path}, record={"cost": cost})


def scored_rows(
    context: Context, key: str, study: TuneStudy, known: list[Any], chosen: int, folder: Path
) -> Iterator[dict[str, Any]]:
    """One row per candidate and task or test, with its divergence over all tasks."""
    names = {
        one.number: (REFERENCE if one.number == study.trials else str(one.number)) for one in known
    }
    models = [
        Scored(name, folder / name, "featcal", study.upstream, "tuned", study.seed)
        for name in names.values()
    ]
    scores = score(context, f"tune {key}", study.role, study.pool, models)
    for one in known:
        reference = names[one.number] == REFERENCE
        words = {
            "trial": one.number,
            "origin": REFERENCE if reference else one.origin,
            "chosen": int(one.number == chosen),
        }
        words |= {
            name: f"{getattr(one.settings, name):g}"
            for name in ("ridge", "anchor_blend", "interpolation")
        }
        yield from ({**row, **words, "divergence": one.mean} for row in scores[names[one.number]])


def part(
    context: Context, study: TuneStudy, calibration: Calibration | None, out: Path
) -> tuple[Any, float]:
    """What one worker does: the path where no settings are given, else one candidate."""
    return (
        path_of(context, study) if calibration is None else tried(context, study, calibration, out)
    )


def path_of(context: Context, study: TuneStudy) -> tuple[float, float]:
    """λ of the path, and seconds."""
    from time import perf_counter

    from featcal.models.load import torch_device
    from featcal.tuning.tune import path_gains, ridge_of
    from reproduction.stages.tuned import parts

    begin, given = perf_counter(), parts(context, study)
    device = torch_device(context.suite.device)
    gains = path_gains(
        given.merged,
        given.base,
        given.experts,
        given.kept,
        given.held,
        study.paper,
        plan=given.plan,
        device=device,
    )
    return ridge_of(gains), round(perf_counter() - begin, 2)


def tried(
    context: Context, study: TuneStudy, calibration: Calibration, out: Path
) -> tuple[dict[str, float], float]:
    """One candidate as the folder `out`: its divergence by task, and seconds."""
    from time import perf_counter

    import featcal
    from featcal.models.load import load_as_calibrated, torch_device
    from featcal.tuning.tune import distances
    from reproduction.stages.tuned import parts

    begin, given, device = perf_counter(), parts(context, study), torch_device(context.suite.device)
    models: dict[str, Any] = {
        "base": given.base,
        "experts": given.experts,
        "batches": given.kept,
        "plan": given.plan,
    }
    featcal.calibrate(given.merged, **models, settings=calibration, device=device, out=out)
    model = load_as_calibrated(out).to(device)  # type: ignore[arg-type]
    found = distances(model, given.experts, given.held, given.head, given.heads)
    return found, round(perf_counter() - begin, 2)
