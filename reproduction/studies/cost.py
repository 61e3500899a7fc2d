"""Table 5: time, memory and energy of each method, alone on the machine; adapters as they train."""

from pathlib import Path
from typing import Annotated

from pydantic import NonNegativeInt, PositiveInt

from featcal.settings import Distinct, require
from reproduction.engine.context import Setup
from reproduction.engine.costs import METHODS, costs
from reproduction.engine.score import score
from reproduction.engine.spec import compared_models
from reproduction.engine.study import StudyResult
from reproduction.experiments import Comparison, Study
from reproduction.results import AUDIT


class CostStudy(Study):
    """Settings. audit: steps after which adapters as published are scored; none: not trained."""

    scores = AUDIT
    described = False
    upstream: str
    comparison: Comparison
    samples: PositiveInt
    seed: NonNegativeInt
    audit: Annotated[tuple[PositiveInt, ...], Distinct]

    def check(self) -> None:
        steps = min(self.comparison.surgery.steps, self.comparison.prob_surgery.steps)
        expected = f"must not go beyond the {steps} steps that are made"
        require(max(self.audit, default=0) <= steps, "cost.audit", self.audit, expected)

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        models = compared_models(self, folder, *METHODS)
        jobs = {model.name: (setup, model, {}) for model in models}
        audited = []
        for model in models[1:] if self.audit else ():
            name, settings = f"{model.name} each_step", model.settings.but(encode="each_step")
            published = model.but(name=name, folder=folder / name, settings=settings)
            audit = {step: folder / f"{name} {step}" for step in self.audit}
            jobs[name] = (setup, published, audit)
            for step, out in audit.items():
                columns = {"encode": "each_step", "samples": self.samples, "step": step}
                audited.append(published.but(name=out.name, folder=out, columns=columns))
        record = costs(self, setup, jobs, 1)
        return StudyResult(score(f"{self.label} score", setup, audited), record=record)
