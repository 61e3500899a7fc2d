"""Figure 5: FeatCal with one of λ, ρ and α varied at a time."""

from itertools import product
from pathlib import Path

from pydantic import NonNegativeInt, PositiveInt

from featcal.settings import Calibration, Settings, require
from reproduction.engine.context import Setup
from reproduction.engine.make import make
from reproduction.engine.score import score
from reproduction.engine.spec import featcal_at
from reproduction.engine.study import StudyResult
from reproduction.experiments import SWEPT, Numbers, Setting, Study
from reproduction.results import SWEEP, Row


class Sweep(Settings):
    """One of λ, ρ and α varied at a time around `featcal`, whose own value is always tried."""

    section = "around"
    setting: Setting
    featcal: Calibration
    ridge: Numbers = ()
    anchor_blend: Numbers = ()
    interpolation: Numbers = ()

    def check(self) -> None:
        for name in SWEPT:
            values, default = getattr(self, name), getattr(self.featcal, name)
            if values and default not in values:
                object.__setattr__(self, name, tuple(sorted((*values, default))))
            for value in values:
                self.featcal.but(**{name: value})

    def points(self) -> dict[Calibration, list[Row]]:
        """Return every model once, with the columns of its points on the curves through it."""
        points: dict[Calibration, list[Row]] = {}
        for name in SWEPT:
            default = getattr(self.featcal, name)
            for value in getattr(self, name):
                point = {"parameter": name, "at": f"{value:g}", "chosen": int(value == default)}
                points.setdefault(self.featcal.but(**{name: value}), []).append(point)
        return points


class SweepStudy(Study):
    """Settings of the study: sweeps around one or more settings, with several mergers."""

    section = "sweep"
    scores = SWEEP
    upstreams: tuple[str, ...]
    samples: PositiveInt
    batch: PositiveInt
    seed: NonNegativeInt
    around: tuple[Sweep, ...]

    def check(self) -> None:
        settings = [sweep.setting for sweep in self.around]
        distinct, expected = len(set(settings)) == len(settings) > 0, "must name each setting once"
        require(distinct, "sweep.around", settings, expected)

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        models, curves = [], list[tuple[str, Row]]()
        for upstream, sweep in product(self.upstreams, self.around):
            columns = {"upstream": upstream, "setting": sweep.setting}
            for number, (settings, points) in enumerate(sweep.points().items()):
                name = f"{upstream}-{sweep.setting}-{number}"
                models.append(featcal_at(self, folder, name, settings, **columns))
                curves += [(name, point) for point in points]
        make(self.label, setup, models)
        scores = score(f"{self.label} score", setup, models)
        return StudyResult([row | point for name, point in curves for row in scores[name]])
