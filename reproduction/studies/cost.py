"""Table 5: time, memory and energy of each rival, alone on the machine; adapters as they train."""

from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import NonNegativeInt, PositiveInt

from featcal.settings import Distinct, require
from reproduction.engine.context import Setup
from reproduction.engine.measured import METHODS, costs, step_folder
from reproduction.engine.spec import merged_model, rival
from reproduction.engine.study import StudyResult, rows_of
from reproduction.experiments import Rivals, Study
from reproduction.results import AUDIT


class CostStudy(Study):
    """Settings. audit: steps after which adapters as published are scored; none: not trained."""

    section = "cost"
    scores = AUDIT
    described = False
    upstream: str
    rivals: Rivals
    samples: PositiveInt
    seed: NonNegativeInt
    audit: Annotated[tuple[PositiveInt, ...], Distinct]

    def check(self) -> None:
        steps = min(self.rivals.surgery.steps, self.rivals.prob_surgery.steps)
        expected = f"must not go beyond the {steps} steps that are made"
        require(max(self.audit, default=0) <= steps, "cost.audit", self.audit, expected)

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        models = [rival(self, method, folder / method) for method in METHODS]
        published = []
        for model in models[1:] if self.audit else ():
            name, settings = f"{model.name} each_step", model.settings.but(encode="each_step")
            published.append(model.but(name=name, folder=folder / name, settings=settings))
        jobs: dict[str, tuple[Any, ...]] = {model.name: (setup, model) for model in models}
        jobs |= {model.name: (setup, model, self.audit) for model in published}
        # nothing runs at the same time, so each has the cores that workers share elsewhere
        record = costs(self, jobs, 1, setup.context.suite.workers or None)
        audited = []
        for model, step in product(published, self.audit):
            columns = {"encode": "each_step", "samples": self.samples, "step": step}
            out, name = step_folder(model.folder, step), f"{model.name} {step}"
            audited.append(model.but(name=name, folder=out, columns=columns))
        others = [merged_model(setup, self.upstream)]
        return StudyResult(rows_of(setup, f"cost {self.key}", audited, others), record=record)
