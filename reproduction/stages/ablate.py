"""Stage `ablate`: what FeatCal's gain is made of, behind some mergers.

FeatCal without one ingredient each; its anchor alone, base + ρ (merged − base); and the merged
model moved along its own change by the factor that is best on samples that are no test samples.
"""

from functools import partial
from pathlib import Path
from typing import Any

from reproduction.experiments.ablate import AblateStudy
from reproduction.experiments.runs import ANCHOR, RESCALED, CalibrateRun
from reproduction.results import SCALES, SCORES
from reproduction.stages import scoring
from reproduction.stages.calibrate import calibrate_one
from reproduction.stages.context import Context
from reproduction.stages.scored import Scored
from reproduction.stages.study import Found, run_study
from reproduction.stages.workers import fan_out

Row = dict[str, Any]


def run(key: str) -> None:
    """Write outputs/<suite>/ablate/<key>/: ablate.csv, .correct.csv, .settings.json, scales.csv; no
    rows where it is not run.
    """
    run_study("ablate", key, ablated, SCORES, {"scales": SCALES})


def ablated(context: Context, key: str, study: AblateStudy, folder: Path) -> Found:
    """Rows of every control, and the sweeps behind the best factors."""
    names = (RESCALED, ANCHOR, *study.without)  # the longest first
    jobs = {
        f"{m} {name}": (context, study, m, name, folder / m / name)
        for name in names
        for m in study.upstreams
    }
    made = dict(fan_out(f"ablate {key}", make, jobs, context.suite.workers))
    models = []
    for merger in study.upstreams:
        for name in (ANCHOR, RESCALED, *study.without):
            words = (
                ("featcal", merger, name, study.seed) if name in study.without else (name, merger)
            )
            models.append(Scored(f"{merger}/{name}", folder / merger / name, *words))
    scores = scoring.score(context, f"evaluate ablate {key}", study.role, study.pool, models)
    scales = [row for merger in study.upstreams for row in made[f"{merger} {RESCALED}"]]
    return Found(
        [row for model in models for row in scores[model.name]],
        {"scales": scales},
        {"study": study.model_dump()},
    )


def make(context: Context, study: AblateStudy, merger: str, name: str, out: Path) -> list[Row]:
    """One control as the folder `out`; what was tried for its factor."""
    if name in study.without:
        changed = CalibrateRun(
            role=study.role,
            pool=study.pool,
            upstream=merger,
            setting=study.setting,
            calibration=study.without[name],
            samples=study.samples,
            batch=study.batch,
            seeds=(study.seed,),
        )
        calibrate_one(context, f"{merger} {name}", changed, study.seed, out)
        return []
    factor, tried = (
        (study.featcal.anchor_blend, []) if name == ANCHOR else best_factor(context, study, merger)
    )
    scaled(context, study, merger, factor, out)
    return tried


def scaled(
    context: Context, study: AblateStudy, merger: str, factor: float, out: Path | None = None
) -> Any:
    """base + factor · (merged − base): task arithmetic of one expert, the merged model. Returns:
    module, or the folder `out`.
    """
    import featcal

    base, merged = (
        context.layout.base(study.role, study.pool),
        context.layout.merged(f"{study.role}-{study.pool}-{merger}"),
    )
    if out is None:
        from featcal.models.load import load_as_calibrated

        return featcal.merge(
            "task_arithmetic",
            load_as_calibrated(base),
            {"merged": load_as_calibrated(merged)},
            scale=factor,
        )
    return featcal.merge("task_arithmetic", base, {"merged": merged}, scale=factor, out=out)


def best_factor(context: Context, study: AblateStudy, merger: str) -> tuple[float, list[Row]]:
    """The factor with the highest average on the samples chosen for it, the smallest of equals, and
    all that were tried.
    """
    from featcal.models.load import torch_device

    rescale, place, device = (
        study.rescale,
        (context, study.role, study.pool),
        torch_device(context.suite.device),
    )
    models = {
        factor: scaled(context, study, merger, factor).to(device) for factor in rescale.factors
    }
    chosen = partial(scoring.drawn, rescale.samples, study.seed)
    values = scoring.averages(
        *place, models, partial(scoring.samples_of, *place, split=rescale.split, most=chosen)
    )
    best = max(rescale.factors, key=lambda factor: (round(values[factor], 4), -factor))
    words = {
        "suite": context.suite.name,
        "role": study.role,
        "pool": study.pool,
        "upstream": merger,
    }
    return best, [
        {**words, "factor": f, "value": values[f], "chosen": int(f == best)}
        for f in rescale.factors
    ]
