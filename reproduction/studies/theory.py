"""The paper's propositions, checked in float64 on the suite's own encoders and on test samples."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from pydantic import NonNegativeInt, PositiveInt

from featcal.settings import Calibration, require
from reproduction.engine.context import Setup
from reproduction.engine.make import make
from reproduction.engine.samples import load_split
from reproduction.engine.spec import featcal_at
from reproduction.engine.study import StudyResult
from reproduction.experiments import Counts, Setting, Study
from reproduction.results import THEORY, THEORY_POINTS, Row

# of an equation, of whose 16 digits a wrong term changes the first; of an inequality: that it holds
REQUIRED = {"digits": 6.0, "room": 0.0}
ORDERS = ("forward", "stale")  # of calibration: on deployed features, and on the merged model's
SOURCES = "sources"  # the job that looks at all tasks together
Lines = tuple[list[Row], list[Row]]  # of statements, and the points of each


class TheoryStudy(Study):
    """Settings of the study: one merged and one calibrated model.

    images: of each task.   traced: of those, followed along their segments token by token.
    nodes:  numbers of quadrature nodes of path-averaged Jacobians.
    """

    tables: ClassVar = {"theory": THEORY, "theory_points": THEORY_POINTS}
    described = False
    upstream: str
    setting: Setting
    featcal: Calibration
    samples: PositiveInt
    batch: PositiveInt
    seed: NonNegativeInt
    images: PositiveInt
    traced: PositiveInt
    nodes: Counts

    def check(self) -> None:
        expected = f"must be at most theory.images, {self.images}"
        require(self.traced <= self.images, "theory.traced", self.traced, expected)

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        label, settings = self.label, self.featcal
        models = [featcal_at(self, folder, order, settings.but(order=order)) for order in ORDERS]
        make(label, setup, models)
        jobs = {name: (setup, self, name, folder) for name in (SOURCES, *setup.tasks)}
        results = setup.context.run(label, check, jobs)
        lines, points = zip(*(results[name] for name in (*setup.tasks, SOURCES)), strict=True)
        common = setup.row_keys | {"upstream": self.upstream}
        rows = [common | line for line in with_worst(list(chain(*lines)))]
        return StudyResult(tables={"theory": rows, "theory_points": list(chain(*points))})


def check(setup: Setup, study: TheoryStudy, task: str, folder: Path) -> Lines:
    """Check one task's statements for the merged and the calibrated model; or check_sources."""
    if task == SOURCES:
        return check_sources(setup, study, folder)
    import torch
    from safetensors.torch import load_file

    from reproduction.theory import drift
    from reproduction.theory.tower import Checks, tower

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


def check_sources(setup: Setup, study: TheoryStudy, folder: Path) -> Lines:
    """Check Proposition 8 and Eq. 45 on all tasks together."""
    import torch

    from reproduction.theory import sources
    from reproduction.theory.tower import Checks

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


def batch_of(setup: Setup, study: TheoryStudy, task: str, count: int) -> tuple[Any, dict[str, Any]]:
    """Return the first `count` of the study's test samples, and all of them as one batch."""
    from featcal.data.batches import draw_indices

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
