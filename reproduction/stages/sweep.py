"""Stage `sweep`: FeatCal with one of λ, ρ and α varied at a time.

Scored on test images, for the report only: what is chosen was chosen on validation images.
"""

from dataclasses import dataclass
from pathlib import Path

from featcal.settings import Calibration
from reproduction.experiments.runs import CalibrateRun
from reproduction.experiments.sweeps import SWEPT, Sweep, SweepStudy
from reproduction.results import SWEEP
from reproduction.stages.calibrate import calibrate_one
from reproduction.stages.context import Context
from reproduction.stages.scored import Scored
from reproduction.stages.scoring import score
from reproduction.stages.study import Found, run_study
from reproduction.stages.workers import fan_out


@dataclass(frozen=True)
class Point:
    """One model of the sweeps, and every (parameter, value) at which it stands."""

    name: str
    upstream: str
    sweep: Sweep
    calibration: Calibration
    places: list[tuple[str, float]]


def run(key: str) -> None:
    """Write outputs/<suite>/sweep/<key>/sweep.csv; no rows where the suite does not run it."""
    run_study("sweep", key, swept, SWEEP)


def points(study: SweepStudy) -> list[Point]:
    """Every model once, whatever the number of curves that go through it."""
    found = []
    for upstream in study.upstreams:
        for sweep in study.around:
            places: dict[Calibration, list[tuple[str, float]]] = {}
            for name in SWEPT:
                for value in getattr(sweep, name):
                    places.setdefault(sweep.at(name, value), []).append((name, value))
            for number, (calibration, those) in enumerate(places.items()):
                found.append(
                    Point(
                        f"{upstream}-{sweep.setting}-{number}", upstream, sweep, calibration, those
                    )
                )
    return found


def swept(context: Context, key: str, study: SweepStudy, folder: Path) -> Found:
    """Rows of every point of every curve. Each model is calibrated anew: in forward order, λ
    decides what later blocks see.
    """
    found = points(study)
    jobs = {}
    for p in found:
        calibrate = CalibrateRun(
            role=study.role,
            pool=study.pool,
            upstream=p.upstream,
            setting=p.sweep.setting,
            calibration=p.calibration,
            samples=study.samples,
            batch=study.batch,
            seeds=(study.seed,),
        )
        jobs[p.name] = (context, f"sweep {key} {p.name}", calibrate, study.seed, folder / p.name)
    for _ in fan_out(f"sweep {key}", calibrate_one, jobs, context.suite.workers):
        pass
    models = [
        Scored(p.name, folder / p.name, "featcal", p.upstream, p.sweep.setting, study.seed)
        for p in found
    ]
    scores = score(context, f"sweep {key}", study.role, study.pool, models)
    rows = []
    for p in found:
        for parameter, value in p.places:
            chosen = int(value == getattr(p.sweep.featcal, parameter))
            words = {"parameter": parameter, "at": f"{value:g}", "chosen": chosen}
            rows += [{**row, **words} for row in scores[p.name]]
    return Found(rows, told={"study": study.model_dump()})
