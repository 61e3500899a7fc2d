"""Figure 5: FeatCal with one of λ, ρ and α varied at a time, scored on test samples.

The scores are for the report only: what is chosen was chosen on validation samples.
"""

from itertools import product
from pathlib import Path

from pydantic import NonNegativeInt, PositiveInt

from featcal.settings import Calibration, Settings, require
from reproduction.engine.context import Setup
from reproduction.engine.make import make
from reproduction.engine.score import score
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
        require(
            len(set(words)) == len(words) > 0, "sweep.around", words, "must name each setting once"
        )

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        """Return rows of every point of every curve.

        Each model is calibrated anew: in forward order, λ decides what later blocks see.
        """
        models, curves = [], dict[str, list[tuple[str, float, float]]]()
        for upstream, sweep in product(self.upstreams, self.around):
            for number, (settings, points) in enumerate(sweep.points().items()):
                name = f"{upstream}-{sweep.setting}-{number}"
                words = ("featcal", upstream, sweep.setting, self.seed, settings, self.drawn())
                models.append(ModelSpec(name, folder / name, *words))
                curves[name] = [(swept, at, getattr(sweep.featcal, swept)) for swept, at in points]
        label, rows = f"sweep {self.key}", []
        make(label, setup, models)
        scores = score(f"{label} score", setup, models)
        for name, points in curves.items():
            for parameter, at, own in points:
                point = {"parameter": parameter, "at": f"{at:g}", "chosen": int(at == own)}
                rows += [row | point for row in scores[name]]
        return StudyResult(rows)
