"""Figure 5: FeatCal with one of λ, ρ and α varied at a time, scored for the report alone."""

from itertools import product
from pathlib import Path

from pydantic import NonNegativeInt, PositiveInt

from featcal.settings import Calibration, Settings, require
from reproduction.engine.context import Setup
from reproduction.engine.make import make
from reproduction.engine.score import Row, score
from reproduction.engine.spec import ModelSpec
from reproduction.engine.study import StudyResult
from reproduction.experiments import SWEPT, Numbers, Setting, Study
from reproduction.results import SWEEP


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
            values, own = getattr(self, name), getattr(self.featcal, name)
            if values and own not in values:
                object.__setattr__(self, name, tuple(sorted((*values, own))))
            for value in values:
                self.featcal.but(**{name: value})

    def points(self) -> dict[Calibration, list[tuple[str, float]]]:
        """Return every model once, with the (parameter, value) pairs of the curves through it."""
        found: dict[Calibration, list[tuple[str, float]]] = {}
        for name in SWEPT:
            for value in getattr(self, name):
                found.setdefault(self.featcal.but(**{name: value}), []).append((name, value))
        return found


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
        words = [sweep.setting for sweep in self.around]
        once, expected = len(set(words)) == len(words) > 0, "must name each setting once"
        require(once, "sweep.around", words, expected)

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        models, curves, label = [], list[tuple[str, Row]](), f"sweep {self.key}"
        for upstream, sweep in product(self.upstreams, self.around):
            for number, (settings, points) in enumerate(sweep.points().items()):
                name = f"{upstream}-{sweep.setting}-{number}"
                words = ("featcal", upstream, sweep.setting, self.seed, settings, self.drawn())
                models.append(ModelSpec(name, folder / name, *words))
                for parameter, at in points:
                    point: Row = {"parameter": parameter, "at": f"{at:g}"}
                    point["chosen"] = int(at == getattr(sweep.featcal, parameter))
                    curves.append((name, point))
        make(label, setup, models)
        scores = score(f"{label} score", setup, models)
        return StudyResult([row | point for name, point in curves for row in scores[name]])
