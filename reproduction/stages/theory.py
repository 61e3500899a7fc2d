"""Stage `theory`: the paper's propositions, checked in float64 on the suite's own encoders and on
test samples.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reproduction.experiments.runs import CalibrateRun
from reproduction.experiments.theory import TheoryStudy
from reproduction.results import THEORY, THEORY_POINTS
from reproduction.stages.calibrate import calibrate_one
from reproduction.stages.context import Context
from reproduction.stages.study import Found, run_study
from reproduction.stages.workers import fan_out

# Of every equation: float64 carries 16 digits, a wrong term shows in the first, a quadrature with
# few nodes in between. Of every
# inequality: that it holds.
REQUIRED = {"digits": 6.0, "room": 0.0}
SOURCES = "sources"  # the job that looks at all tasks together
Lines = tuple[list[dict[str, Any]], list[dict[str, Any]]]  # and the points behind them


def run(key: str) -> None:
    """Write outputs/<suite>/theory/<key>/{theory,theory_points}.csv; no rows where it is not
    run.
    """
    run_study(
        "theory",
        key,
        found,
        more={"theory": THEORY, "theory_points": THEORY_POINTS},
        settings=False,
    )


def found(context: Context, key: str, study: TheoryStudy, kept: Path) -> Found:
    """Lines of every statement, and the points behind them."""
    lines = checked(context, key, study, kept)
    points = [point for name in lines for point in lines[name][1]]
    return Found(more={"theory": rows_of(context, study, lines), "theory_points": points})


def checked(context: Context, key: str, study: TheoryStudy, kept: Path) -> dict[str, Lines]:
    """Lines and points by task, and those that take all tasks together, in the pool's order."""
    orders = {order: (context, key, study, order, kept / order) for order in ("forward", "stale")}
    for _ in fan_out(f"theory {key}", calibrated, orders, context.suite.workers):
        pass
    tasks = context.suite.tasks_of(study.role, study.pool)
    jobs: dict[str, tuple[Any, ...]] = {
        task: (context, study, task, kept) for task in (SOURCES, *tasks)
    }
    found = dict(fan_out(f"theory {key}", check, jobs, context.suite.workers))
    return {name: found[name] for name in (*tasks, SOURCES)}


def calibrated(context: Context, key: str, study: TheoryStudy, order: Any, out: Path) -> None:
    """FeatCal with the study's settings, on deployed features or on stale ones."""
    settings = study.featcal.but(order=order)
    one = CalibrateRun(
        role=study.role,
        pool=study.pool,
        upstream=study.upstream,
        setting=study.setting,
        calibration=settings,
        samples=study.samples,
        batch=study.batch,
        seeds=(study.seed,),
    )
    calibrate_one(context, f"theory {key} {order}", one, study.seed, out)


def check(context: Context, study: TheoryStudy, name: str, kept: Path) -> Lines:
    """One task, or the sources of all."""
    return (
        check_sources(context, study, kept)
        if name == SOURCES
        else check_task(context, study, name, kept)
    )


def check_task(context: Context, study: TheoryStudy, task: str, kept: Path) -> Lines:
    """Propositions 1 to 7, both corollaries and the margin condition on one task, of the merged and
    of the calibrated model.
    """
    import torch
    from safetensors.torch import load_file

    from featcal.models.load import torch_device
    from reproduction.theory import drift, losses, propagation, scores
    from reproduction.theory.found import Found
    from reproduction.theory.tower import tower

    layout, device = context.layout, torch_device(context.suite.device)
    samples, some = (drawn(context, study, task, count) for count in (study.images, study.traced))
    batch, single = whole(samples), list(some.batches(None, 1))
    tensors = load_file(layout.heads(study.role, study.pool))
    projection, classes = (
        tensors[name].double().to(device) if name in tensors else None
        for name in ("visual_projection", f"head/{task}")
    )
    head = scores.Head(projection, classes, float(tensors["logit_scale"].double().exp()))
    expert = model_of(context, layout.expert(study.role, study.pool, task))
    theirs, traced = tower(expert, batch), [tower(expert, one) for one in single]
    rows, points = [], []
    for words, folder in models_of(context, study, kept):
        found, model = Found(), model_of(context, folder)
        ours = tower(model, batch)
        drifts = drift.decomposed(ours, theirs)
        drift.check_decomposition(drifts, found)
        drift.check_residual(drifts, found)
        drift.check_growth(drifts, found)
        pairs = [(tower(model, one), alone) for one, alone in zip(single, traced, strict=True)]
        propagation.check_propagation(pairs, study.nodes, found)
        moved = scores.score_drift(ours, theirs, head)
        scores.check_scores(moved, found)
        losses.check_loss(moved, torch.as_tensor(samples.labels).to(device), study.nodes, found)
        losses.check_margins(moved, found)
        rows += [{**words, "task": task, **line} for line in found.lines]
        points += [{**words, "task": task, **point} for point in found.points]
    return rows, points


def check_sources(context: Context, study: TheoryStudy, kept: Path) -> Lines:
    """Proposition 8 and Eq. 45 on all tasks together."""
    from reproduction.theory import deployed
    from reproduction.theory.found import Found

    layout, tasks = context.layout, context.suite.tasks_of(study.role, study.pool)
    models = deployed.Models(
        base=model_of(context, layout.base(study.role, study.pool)),
        merged=model_of(context, layout.merged(f"{study.role}-{study.pool}-{study.upstream}")),
        experts={
            task: model_of(context, layout.expert(study.role, study.pool, task)) for task in tasks
        },
        forward=model_of(context, kept / "forward"),
        stale=model_of(context, kept / "stale"),
    )
    batches = {task: whole(drawn(context, study, task, study.traced)) for task in tasks}
    found = Found()
    deployed.check_sources(models, batches, study.featcal, found)
    words = {"method": "featcal", "setting": study.setting, "task": ""}
    return [{**words, **line} for line in found.lines], [
        {**words, **point} for point in found.points
    ]


def models_of(
    context: Context, study: TheoryStudy, kept: Path
) -> Iterator[tuple[dict[str, str], Path]]:
    """The merged and the calibrated model, as the results call them."""
    yield (
        {"method": "merged", "setting": ""},
        context.layout.merged(f"{study.role}-{study.pool}-{study.upstream}"),
    )
    yield {"method": "featcal", "setting": study.setting}, kept / "forward"


def model_of(context: Context, folder: Path) -> Any:
    """An encoder in float64, where the suite computes."""
    import torch

    from featcal.models.load import load_as_calibrated, torch_device

    return load_as_calibrated(folder, torch.float64).to(torch_device(context.suite.device))  # type: ignore[arg-type]


def drawn(context: Context, study: TheoryStudy, task: str, count: int) -> Any:
    """The first `count` of the samples drawn for the study from the test samples of a task."""
    from featcal.data.batches import draw_indices
    from reproduction.prepare.sources import load_task

    samples = load_task(
        context.layout.data_of(study.role),
        task,
        "test",
        context.layout.base(study.role, study.pool),
    )
    return samples.take(draw_indices(task, len(samples.labels), study.images, study.seed)[:count])


def whole(samples: Any) -> dict[str, Any]:
    """All samples in one batch."""
    batch: dict[str, Any] = next(iter(samples.batches(None, len(samples))))
    return batch


def rows_of(context: Context, study: TheoryStudy, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every line; with an empty task the worst of all tasks of what must hold on every one; and
    what that is held against.
    """
    lines = [line for name in found for line in found[name][0]]
    worst: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        if line["quantity"] in REQUIRED:
            key = tuple(line[column] for column in ("method", "setting", "statement", "quantity"))
            known = worst.get(key, {**line, "task": "", "count": 0})
            worst[key] = known | {
                "value": min(known["value"], line["value"]),
                "count": known["count"] + line["count"],
            }
    held = {(line["statement"], line["quantity"]): line for line in worst.values()}
    required = [
        {
            **line,
            "method": "required",
            "setting": "",
            "value": REQUIRED[line["quantity"]],
            "count": 0,
        }
        for line in held.values()
    ]
    there = [line for line in lines if line["task"] or line["quantity"] not in REQUIRED]
    words = {
        "suite": context.suite.name,
        "role": study.role,
        "pool": study.pool,
        "upstream": study.upstream,
    }
    return [words | line for line in (*there, *worst.values(), *required)]
