"""The paper's propositions, checked in float64 on the suite's own encoders and on test samples."""

from itertools import chain
from pathlib import Path
from typing import ClassVar

from pydantic import NonNegativeInt, PositiveInt

from featcal.settings import Calibration, require
from reproduction.engine.context import Setup
from reproduction.engine.make import make
from reproduction.engine.spec import featcal_at
from reproduction.engine.study import StudyResult
from reproduction.experiments import Counts, Setting, Study
from reproduction.results import THEORY, THEORY_POINTS
from reproduction.theory.checked import ORDERS, SOURCES, checked, with_worst


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
        results = setup.context.run(label, checked, jobs)
        lines, points = zip(*(results[name] for name in (*setup.tasks, SOURCES)), strict=True)
        common = setup.row_keys | {"upstream": self.upstream}
        rows = [common | line for line in with_worst(list(chain(*lines)))]
        return StudyResult(tables={"theory": rows, "theory_points": list(chain(*points))})
