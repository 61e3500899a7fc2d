"""Ablations: FeatCal with one ingredient less, its anchor alone, and the rescaled merged model."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt

from featcal.settings import Calibration, Settings
from reproduction.engine.context import Setup
from reproduction.engine.make import rescale
from reproduction.engine.samples import Selection
from reproduction.engine.score import averages, highest
from reproduction.engine.spec import ModelSpec, featcal_at
from reproduction.engine.study import StudyResult, make_and_score
from reproduction.experiments import ANCHOR, RESCALED, Each, Setting, Study
from reproduction.results import SCALES, SCORES


class Rescaling(Settings):
    """Factors of the merged model's change from the base, and the samples that choose one."""

    section = "rescale"
    factors: Each[float]
    split: Literal["validation", "train"]
    samples: PositiveInt


class AblateStudy(Study):
    """Settings of the study. without: by name, `featcal` with what a group changes in it."""

    scores = SCORES
    tables: ClassVar = {"scales": SCALES}
    setting: Setting
    featcal: Calibration
    upstreams: tuple[str, ...]
    samples: PositiveInt
    batch: PositiveInt
    seed: NonNegativeInt
    without: Mapping[str, Calibration]
    rescale: Rescaling

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        jobs = {upstream: (setup, self, upstream) for upstream in self.upstreams}
        accuracies = setup.context.run(f"{self.label} factor", factor_accuracies, jobs)
        models, scales = [], []
        for upstream, values in accuracies.items():
            best, out = highest(values), folder / upstream
            for factor, value in values.items():
                keys = setup.row_keys | {"upstream": upstream, "factor": factor}
                scales.append(keys | {"value": value, "chosen": int(factor == best)})
            for name, factor in ((ANCHOR, self.featcal.anchor_blend), (RESCALED, best)):
                model = ModelSpec(f"{upstream}/{name}", out / name, name, upstream, settings=factor)
                models.append(model)
            for name, changed in self.without.items():
                fields = {"upstream": upstream, "setting": name}
                models.append(featcal_at(self, folder, f"{upstream}/{name}", changed, **fields))
        return StudyResult(make_and_score(self.label, setup, models), {"scales": scales})


def factor_accuracies(setup: Setup, study: AblateStudy, upstream: str) -> dict[float, float]:
    """Return the average accuracy at every factor, on samples that are no test samples."""
    device, rescaling = setup.context.device, study.rescale
    models = {factor: rescale(setup, upstream, factor).to(device) for factor in rescaling.factors}
    return averages(setup, models, Selection(rescaling.split, rescaling.samples, study.seed))
