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

    section = "theory"
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
        label, own = self.label, self.featcal
        models = [featcal_at(self, folder, order, own.but(order=order)) for order in ORDERS]
        make(label, setup, models)
        jobs = {name: (setup, self, name, folder) for name in (SOURCES, *setup.tasks)}
        found = setup.context.run(label, check, jobs)
        lines, points = zip(*(found[name] for name in (*setup.tasks, SOURCES)), strict=True)
        common = setup.words | {"upstream": self.upstream}
        rows = [common | line for line in with_worst(list(chain(*lines)))]
        return StudyResult(tables={"theory": rows, "theory_points": list(chain(*points))})


def check(setup: Setup, study: TheoryStudy, task: str, folder: Path) -> Lines:
    """Check what holds of one task, of the merged and of the calibrated model; or check_sources."""
    if task == SOURCES:
        return check_sources(setup, study, folder)
    import torch
    from safetensors.torch import load_file

    from reproduction.theory import drift
    from reproduction.theory.tower import Checks, tower

    device, tensors = setup.context.device, load_file(setup.heads)
    samples, batch = drawn(setup, study, task, study.images)
    single = list(drawn(setup, study, task, study.traced)[0].batches(None, 1))
    tensors = {name: tensor.double().to(device) for name, tensor in tensors.items()}
    given = (tensors.get("visual_projection"), tensors[f"head/{task}"])
    head = drift.ScoreHead(*given, float(tensors["logit_scale"].exp()))
    labels = torch.as_tensor(samples.labels).to(device)
    expert = setup.load(setup.expert(task), torch.float64)
    theirs, traced = tower(expert, batch), [tower(expert, one) for one in single]
    rows, points = [], []
    merged, calibrated = setup.merged(study.upstream), folder / "forward"
    for method, setting, path in (("merged", "", merged), ("featcal", study.setting, calibrated)):
        found, model = Checks(), setup.load(path, torch.float64)
        ours = tower(model, batch)
        drifts = drift.decomposed(ours, theirs)
        drift.check_decomposition(drifts, found)
        drift.check_residual(drifts, found)
        drift.check_growth(drifts, found)
        pairs = [(tower(model, one), alone) for one, alone in zip(single, traced, strict=True)]
        drift.check_propagation(pairs, study.nodes, found)
        moved = drift.score_drift(ours, theirs, head)
        drift.check_scores(moved, found)
        drift.check_loss(moved, labels, study.nodes, found)
        drift.check_margins(moved, found)
        words = {"method": method, "setting": setting, "task": task}
        rows += [words | line for line in found.lines]
        points += [words | point for point in found.points]
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
    batches = {task: drawn(setup, study, task, study.traced)[1] for task in setup.tasks}
    found = Checks()
    sources.check_sources(models, batches, study.featcal, found)
    words = {"method": "featcal", "setting": study.setting, "task": ""}
    return [words | line for line in found.lines], [words | point for point in found.points]


def drawn(setup: Setup, study: TheoryStudy, task: str, count: int) -> tuple[Any, dict[str, Any]]:
    """Return the first `count` of the study's test samples, and all of them as one batch."""
    from featcal.data.batches import draw_indices

    samples = load_split(setup, task, "test")
    chosen = draw_indices(task, len(samples.labels), study.images, study.seed)
    samples = samples.take(chosen[:count])
    return samples, next(iter(samples.batches(None, len(samples))))


def with_worst(lines: Sequence[Row]) -> list[Row]:
    """Return every line, the worst over tasks of what must hold on each, and what is required."""
    worst = dict[Any, Row]()
    for line in (line for line in lines if line["quantity"] in REQUIRED):
        key = tuple(line[column] for column in ("method", "setting", "statement", "quantity"))
        known = worst.get(key, {**line, "task": "", "count": 0})
        value, count = min(known["value"], line["value"]), known["count"] + line["count"]
        worst[key] = known | {"value": value, "count": count}
    held = {(line["statement"], line["quantity"]): line for line in worst.values()}
    shared = {"method": "required", "setting": "", "count": 0}
    required = [{**line, **shared, "value": REQUIRED[line["quantity"]]} for line in held.values()]
    there = [line for line in lines if line["task"] or line["quantity"] not in REQUIRED]
    return [*there, *worst.values(), *required]
