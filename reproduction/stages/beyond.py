"""Stage `beyond`: ideas beyond the paper, each alone and together, from several mergers.

One variant is chosen by its mean on validation samples, labels included, as the suite's own settings were. Test samples are
answered too, for the report alone.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from reproduction.experiments.beyond import OWN, BeyondStudy, Trial
from reproduction.stages.columns import BEYOND
from reproduction.stages.context import Context
from reproduction.stages.study import Found, run_study
from reproduction.stages.workers import fan_out

Row = dict[str, Any]


def run(key: str) -> None:
    """Write outputs/<suite>/beyond/<key>/: beyond.csv, .correct.csv, .settings.json; no rows where the suite does not run it."""
    run_study("beyond", key, compared, BEYOND)


def compared(context: Context, key: str, study: BeyondStudy, _: Path) -> Found:
    """Rows of every model, the study with the variant that was chosen, and seconds of every calibration."""
    trials = study.first()
    found = tried_all(context, key, study, trials)
    means = {v: validation(study, found, v) for v in study.variants}
    chosen = max(means, key=lambda variant: means[variant])
    more = study.further(chosen)
    found |= tried_all(context, key, study, more)
    tasks = context.suite.tasks_of(study.role, study.pool)
    common = {"suite": context.suite.name, "role": study.role, "pool": study.pool, "metric": "accuracy"}
    rows = [
        {**common, **words(trial), "chosen": int(trial.variant == chosen), "task": task, **found[trial.name][0][task]}
        for trial in (*trials, *more)
        for task in tasks
    ]
    seconds = {trial.name: found[trial.name][1] for trial in (*trials, *more) if trial.settings}
    return Found(rows, told={"study": asdict(study), "chosen": chosen, "validation": means}, record={"cost": seconds})


def words(trial: Trial) -> Row:
    """How results call a model."""
    drawn = {"samples": trial.samples, "seed": trial.seed} if trial.settings else {"samples": 0, "seed": ""}
    setting = trial.variant if trial.variant in OWN[1:] else "beyond" if trial.settings else ""
    method = "featcal" if trial.settings else "merged"
    return {"upstream": trial.upstream, "method": method, "setting": setting, "variant": trial.variant, **drawn}


def validation(study: BeyondStudy, found: Mapping[str, Any], variant: str) -> float:
    """Mean over mergers, of those that it is chosen on, and tasks of a variant's scores on validation samples."""
    values = [row["validation"] for t in study.first() if t.variant == variant for row in found[t.name][0].values()]
    return sum(values) / len(values)


def tried_all(context: Context, key: str, study: BeyondStudy, trials: list[Trial]) -> dict[str, tuple[dict[str, Row], float]]:
    """What `tried` returns, of every model by name."""
    jobs = {trial.name: (context, study, trial) for trial in trials}
    return dict(fan_out(f"beyond {key}", tried, jobs, context.suite.workers))


def tried(context: Context, study: BeyondStudy, trial: Trial) -> tuple[dict[str, Row], float]:
    """One model, scored by task on validation and test samples, and the seconds of its calibration; no weights are kept."""
    from time import perf_counter

    import featcal
    from featcal.models.device import torch_device
    from featcal.models.load import load_as_calibrated
    from reproduction.experiments.runs import Draw
    from reproduction.stages.streams import streams

    layout, role, pool = context.layout, study.role, study.pool
    device = torch_device(context.suite.device)
    merged, begin = layout.merged(f"{role}-{pool}-{trial.upstream}"), perf_counter()
    if trial.settings is None:
        model = load_as_calibrated(merged).to(device)  # type: ignore[arg-type]
    else:
        draw = Draw("train", trial.samples, study.batch, trial.seed)
        batches = {task: list(given) for task, given in streams(context, role, pool, draw).items()}
        experts = {task: layout.expert(role, pool, task) for task in batches}
        begin = perf_counter()
        given: dict[str, Any] = {"base": layout.base(role, pool), "experts": experts, "batches": batches, "device": device}
        result = featcal.calibrate(merged, settings=trial.settings, **given)
        assert result.model is not None
        model = result.model
    seconds = round(perf_counter() - begin, 2)
    return {task: scores(context, study, model, task) for task in context.suite.tasks_of(role, pool)}, seconds


def scores(context: Context, study: BeyondStudy, model: Any, task: str) -> Row:
    """Percent right of validation and of test samples, and which of the latter."""
    from dataclasses import replace

    from safetensors.torch import load_file

    from featcal.data.images import ImageSet
    from featcal.evaluation.accuracy import evaluate_pool, percent
    from featcal.models.device import torch_device
    from featcal.storage.results import packed
    from reproduction.stages.evaluate import BATCH
    from reproduction.suites.load_task import load_task

    layout, role, pool = context.layout, study.role, study.pool
    tensors, right = load_file(layout.heads(role, pool)), {}
    for split in ("validation", "test"):
        samples = load_task(layout.data_of(role), task, split, layout.base(role, pool))
        samples = replace(samples, device=torch_device(context.suite.device)) if isinstance(samples, ImageSet) else samples
        heads, projection = {task: tensors[f"head/{task}"]}, tensors.get("visual_projection")
        right[split] = evaluate_pool({"model": model}, {task: samples}, heads, projection, BATCH)["model"][task]
    test = right["test"]
    return {
        "validation": percent(right["validation"]), "value": percent(test), "count": len(test), "correct": packed(test),
    }  # fmt: skip
