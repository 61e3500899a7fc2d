"""What FeatCal's gain is made of: one ingredient less, its anchor alone, and the merger rescaled."""

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

    section = "ablate"
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
        tried = setup.context.run(f"{self.label} factor", tried_factors, jobs)
        models, scales = [], []
        for upstream, values in tried.items():
            best = highest(values)
            words, out = setup.words | {"upstream": upstream}, folder / upstream
            for factor, value in values.items():
                scales.append(words | {"factor": factor, "value": value})
                scales[-1]["chosen"] = int(factor == best)
            for name, factor in ((ANCHOR, self.featcal.anchor_blend), (RESCALED, best)):
                model = ModelSpec(f"{upstream}/{name}", out / name, name, upstream, settings=factor)
                models.append(model)
            for name, changed in self.without.items():
                own = {"upstream": upstream, "setting": name}
                models.append(featcal_at(self, folder, f"{upstream}/{name}", changed, **own))
        return StudyResult(make_and_score(setup, self.label, models), {"scales": scales})


def tried_factors(setup: Setup, study: AblateStudy, upstream: str) -> dict[float, float]:
    """Return the average accuracy at every factor, on samples that are no test samples."""
    device, own = setup.context.device, study.rescale
    models = {factor: rescale(setup, upstream, factor).to(device) for factor in own.factors}
    return averages(setup, models, Selection(own.split, own.samples, study.seed))
