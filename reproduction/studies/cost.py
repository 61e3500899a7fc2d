"""Table 5: time, memory and energy of each rival, alone on the machine, and adapters scored while
they train. What was measured varies from run to run and goes to the run record.
"""

from pathlib import Path
from typing import Annotated

from pydantic import NonNegativeInt, PositiveInt

from featcal.settings import Distinct, require
from reproduction.engine.context import Setup
from reproduction.engine.measured import METHODS, Method, measure, merged_model, step_folder
from reproduction.engine.score import score
from reproduction.engine.study import Found
from reproduction.engine.workers import alone
from reproduction.experiments import Rivals, Study
from reproduction.results import AUDIT


class CostStudy(Study):
    """Settings of the study.

    audit: steps after which adapters as published are scored; without any they are not trained.
    """

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

    def found(self, setup: Setup, folder: Path) -> Found:
        """Return scores of the adapters as published, and what every rival cost."""
        given, label = (self.upstream, self.samples, self.seed, self.rivals), f"cost {self.key}"
        chosen = [Method(method, *given) for method in METHODS]
        published = [Method(m, *given, "each_step") for m in METHODS[1:] if self.audit]
        jobs = {one.name: (setup, one, folder / one.name) for one in chosen}
        jobs |= {one.name: (setup, one, folder / one.name, self.audit) for one in published}
        # nothing runs at the same time, so each has the cores that workers share elsewhere
        threads = setup.context.suite.workers or None
        cost = [one for _, one in alone(label, measure, jobs, 1, threads)]
        models = []
        for one in published:
            for step in self.audit:
                out, name = step_folder(folder / one.name, step), f"{one.name} {step}"
                columns = {"encode": one.encode, "samples": one.samples, "step": step}
                models.append(one.spec(out, name, **columns))
        scores = score(f"{label} score", setup, [merged_model(setup, self.upstream), *models])
        rows = [row for model in models for row in scores[model.name]]
        record = {"cost": cost, "at_once": 1, "threads": threads, "settings": self.model_dump()}
        return Found(rows, record=record)
