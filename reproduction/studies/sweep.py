"""Figure 5: FeatCal with one of λ, ρ and α varied at a time."""

from itertools import product
from pathlib import Path

from pydantic import NonNegativeInt, PositiveInt

from featcal.settings import Calibration, Settings, require
from reproduction.engine.context import Setup
from reproduction.engine.spec import featcal_at
from reproduction.engine.study import StudyResult, make_and_score
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
        self.points()

    def points(self) -> dict[Calibration, list[Row]]:
        """Return every model once, with the columns of its points on the curves through it.

        Raises: BadSetting for a value that FeatCal does not take.
        """
        points: dict[Calibration, list[Row]] = {}
        for name in SWEPT:
            values, default = getattr(self, name), getattr(self.featcal, name)
            for value in sorted({*values, default}) if values else ():
                point = {"parameter": name, "at": f"{value:g}", "chosen": int(value == default)}
                points.setdefault(self.featcal.but(**{name: value}), []).append(point)
        return points


class SweepStudy(Study):
    """Settings of the study: sweeps around one or more settings, with several mergers."""

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
        models = []
        for upstream, sweep in product(self.upstreams, self.around):
            fields = {"upstream": upstream, "setting": sweep.setting}
            for number, (settings, points) in enumerate(sweep.points().items()):
                name = f"{upstream}-{sweep.setting}-{number}"
                model = featcal_at(self, folder, name, settings, **fields)
                models += [model.but(columns=point) for point in points]
        return StudyResult(make_and_score(self.label, setup, models))
