"""Stage `beyond`: ideas beyond the paper, each alone and together, from several mergers.

One variant is chosen by its mean on validation samples, labels included, as the suite's own
settings were. Test samples are answered too, for the report alone. Language models are scored by
what they generate, encoders by their features.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from featcal.settings import PRESETS
from reproduction.experiments.beyond import OWN, BeyondStudy, Trial
from reproduction.results import BEYOND
from reproduction.stages.context import Context
from reproduction.stages.study import Found, run_study
from reproduction.stages.workers import fan_out

Row = dict[str, Any]


def run(key: str) -> None:
    """Write outputs/<suite>/beyond/<key>/: beyond.csv, .correct.csv, .settings.json; no rows where
    the suite does not run it.
    """
    run_study("beyond", key, compared, BEYOND)


def compared(context: Context, key: str, study: BeyondStudy, _: Path) -> Found:
    """Rows of every model, the study with the variant that was chosen, and seconds of every
    calibration.
    """
    trials = study.first()
    found = tried_all(context, key, study, trials, ("validation", "test"))
    means = {v: validation(study, found, v) for v in study.candidates}
    chosen = max(means, key=lambda variant: means[variant])
    more = study.further(chosen)
    found |= tried_all(context, key, study, more, ("test",))
    common = {"suite": context.suite.name, "role": study.role, "pool": study.pool}
    rows = [
        {**common, **words(trial), "chosen": int(trial.variant == chosen), "task": task, **scores}
        for trial in (*trials, *more)
        for task, scores in found[trial.name][0].items()
    ]
    cost = {trial.name: found[trial.name][1] for trial in (*trials, *more) if trial.settings}
    told = {
        "study": study.model_dump(),
        "chosen": chosen,
        "validation": means,
        "preset": PRESETS["best"],
    }
    return Found(rows, told=told, record={"cost": cost})


def words(trial: Trial) -> Row:
    """How results call a model."""
    drawn = (
        {"samples": trial.samples, "seed": trial.seed}
        if trial.settings
        else {"samples": 0, "seed": ""}
    )
    setting = trial.variant if trial.variant in OWN[1:] else "beyond" if trial.settings else ""
    method = "featcal" if trial.settings else "merged"
    return {
        "upstream": trial.upstream,
        "method": method,
        "setting": setting,
        "variant": trial.variant,
        **drawn,
    }


def validation(study: BeyondStudy, found: Mapping[str, Any], variant: str) -> float:
    """Mean over mergers, of those that it is chosen on, and tasks of a variant's scores on
    validation samples.
    """
    values = [
        row["validation"]
        for t in study.first()
        if t.variant == variant
        for row in found[t.name][0].values()
    ]
    return sum(values) / len(values)


def tried_all(
    context: Context, key: str, study: BeyondStudy, trials: list[Trial], splits: Sequence[str]
) -> dict[str, tuple[dict[str, Row], Row]]:
    """What `tried` returns, of every model by name."""
    jobs = {trial.name: (context, study, trial, splits) for trial in trials}
    return dict(fan_out(f"beyond {key}", tried, jobs, context.suite.workers))


def tried(
    context: Context, study: BeyondStudy, trial: Trial, splits: Sequence[str]
) -> tuple[dict[str, Row], Row]:
    """One model, scored by task on samples of some splits, and what its calibration took; no
    weights are kept.
    """
    from time import perf_counter

    import featcal
    from featcal.models.load import load_as_calibrated, torch_device

    layout, role, pool = context.layout, study.role, study.pool
    device, begin = torch_device(context.suite.device), perf_counter()
    merged = layout.merged(f"{role}-{pool}-{trial.upstream}")
    if trial.settings is None:
        model = load_as_calibrated(merged).to(device)  # type: ignore[arg-type]
    else:
        batches, plan = drawn(context, study, trial)
        experts = {task: layout.expert(role, pool, task) for task in batches}
        begin = perf_counter()
        given: dict[str, Any] = {
            "base": layout.base(role, pool),
            "experts": experts,
            "batches": batches,
        }
        result = featcal.calibrate(
            merged, settings=trial.settings, plan=plan, device=device, **given
        )
        assert result.model is not None
        model = result.model
    cost = {"seconds": round(perf_counter() - begin, 2)}
    return scores(context, study, model, splits), cost


def drawn(context: Context, study: BeyondStudy, trial: Trial) -> tuple[dict[str, list[Any]], Any]:
    """Training samples of every task, and the plan whose sums count what they should."""
    from reproduction.stages.streams import plan_of, streams

    given = streams(context, study.role, study.pool, study.draw(trial), reading=study.reading)
    return {task: list(batches) for task, batches in given.items()}, plan_of(
        context, study.role, study.pool, study.reading
    )


def scores(
    context: Context, study: BeyondStudy, model: Any, splits: Sequence[str]
) -> dict[str, Row]:
    """By task or by test, scores of validation and of test samples, and which of the latter are
    right.
    """
    from reproduction.stages import scoring

    place, found = (context, study.role, study.pool), {}
    for split in splits:
        if study.reading is None:
            read = partial(scoring.samples_of, *place, split=split)
            found[split] = scoring.answers(*place, lambda _: {"model": model}, read)["model"]
        else:
            found[split] = scoring.generated(*place, lambda _: model, {"model": None}, split)[
                "model"
            ]
    validation = {task: counts["value"] for task, counts in found.get("validation", {}).items()}
    return {
        task: {"metric": "accuracy", "validation": validation.get(task), **counts}
        for task, counts in found["test"].items()
    }
