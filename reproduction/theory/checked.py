"""The statements of the theory on one task's test samples, for a merged and a calibrated model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from featcal.data.batches import draw_indices
from reproduction.engine.context import Setup
from reproduction.engine.samples import load_split
from reproduction.results import Row
from reproduction.theory import drift, sources
from reproduction.theory.tower import Checks, tower

# of an equation, of whose 16 digits a wrong term changes the first; of an inequality: that it holds
REQUIRED = {"digits": 6.0, "room": 0.0}
ORDERS = ("forward", "stale")  # of calibration: on deployed features, and on the merged model's
SOURCES = "sources"  # the job that looks at all tasks together
Lines = tuple[list[Row], list[Row]]  # of statements, and the points of each


def checked(setup: Setup, study: Any, task: str, folder: Path) -> Lines:
    """Check one task's statements for the merged and the calibrated model; or check_sources."""
    if task == SOURCES:
        return check_sources(setup, study, folder)
    device, tensors = setup.context.device, load_file(setup.heads)
    samples, batch = batch_of(setup, study, task, study.images)
    single = list(batch_of(setup, study, task, study.traced)[0].batches(None, 1))
    tensors = {name: tensor.double().to(device) for name, tensor in tensors.items()}
    weights = (tensors.get("visual_projection"), tensors[f"head/{task}"])
    head = drift.ScoreHead(*weights, float(tensors["logit_scale"].exp()))
    labels = torch.as_tensor(samples.labels).to(device)
    expert = setup.load(setup.expert(task), torch.float64)
    expert_tower, expert_towers = tower(expert, batch), [tower(expert, sample) for sample in single]
    rows, points = [], []
    merged, calibrated = setup.merged(study.upstream), folder / "forward"
    for method, setting, path in (("merged", "", merged), ("featcal", study.setting, calibrated)):
        checks, model = Checks(), setup.load(path, torch.float64)
        model_tower = tower(model, batch)
        drifts = drift.decomposed(model_tower, expert_tower)
        drift.check_decomposition(drifts, checks)
        drift.check_residual(drifts, checks)
        drift.check_growth(drifts, checks)
        pairs = [(tower(model, x), t) for x, t in zip(single, expert_towers, strict=True)]
        drift.check_propagation(pairs, study.nodes, checks)
        drifts_of_scores = drift.score_drift(model_tower, expert_tower, head)
        drift.check_scores(drifts_of_scores, checks)
        drift.check_loss(drifts_of_scores, labels, study.nodes, checks)
        drift.check_margins(drifts_of_scores, checks)
        keys = {"method": method, "setting": setting, "task": task}
        rows += [keys | line for line in checks.lines]
        points += [keys | point for point in checks.points]
    return rows, points


def check_sources(setup: Setup, study: Any, folder: Path) -> Lines:
    """Check Proposition 8 and Eq. 45 on all tasks together."""
    paths = {"base": setup.base, "merged": setup.merged(study.upstream)}
    paths |= {order: folder / order for order in ORDERS}
    loaded = {name: setup.load(path, torch.float64) for name, path in paths.items()}
    experts = {task: setup.load(path, torch.float64) for task, path in setup.experts.items()}
    models = sources.SourceModels(**loaded, experts=experts)
    batches = {task: batch_of(setup, study, task, study.traced)[1] for task in setup.tasks}
    checks = Checks()
    sources.check_sources(models, batches, study.featcal, checks)
    keys = {"method": "featcal", "setting": study.setting, "task": ""}
    return [keys | line for line in checks.lines], [keys | point for point in checks.points]


def batch_of(setup: Setup, study: Any, task: str, count: int) -> tuple[Any, dict[str, Any]]:
    """Return the first `count` of the study's test samples, and all of them as one batch."""
    samples = load_split(setup, task, "test")
    indices = draw_indices(task, len(samples.labels), study.images, study.seed)
    samples = samples.take(indices[:count])
    return samples, next(iter(samples.batches(None, len(samples))))


def with_worst(lines: Sequence[Row]) -> list[Row]:
    """Return every line, the worst over tasks of what must hold on each, and what is required."""
    worst = dict[Any, Row]()
    for line in (line for line in lines if line["quantity"] in REQUIRED):
        key = tuple(line[column] for column in ("method", "setting", "statement", "quantity"))
        previous = worst.get(key, {**line, "task": "", "count": 0})
        value, count = min(previous["value"], line["value"]), previous["count"] + line["count"]
        worst[key] = previous | {"value": value, "count": count}
    by_key = {(line["statement"], line["quantity"]): line for line in worst.values()}
    shared = {"method": "required", "setting": "", "count": 0}
    required = [{**line, **shared, "value": REQUIRED[line["quantity"]]} for line in by_key.values()]
    listed = [line for line in lines if line["task"] or line["quantity"] not in REQUIRED]
    return [*listed, *worst.values(), *required]
