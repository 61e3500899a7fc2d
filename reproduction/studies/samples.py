"""Tables 12 and 13, Figure 3: accuracy and cost of FeatCal and adapters by the number of samples per task."""

from itertools import product
from pathlib import Path
from typing import ClassVar

from featcal.settings import Calibration
from reproduction.engine.context import Setup
from reproduction.engine.costs import METHODS, costs
from reproduction.engine.samples import seen_rows
from reproduction.engine.score import score
from reproduction.engine.spec import compared_models, merged_model
from reproduction.engine.study import StudyResult
from reproduction.experiments import Comparison, Counts, Seeds, Study
from reproduction.results import SAMPLES, SEEN


class SamplesStudy(Study):
    """Settings. at_papers: FeatCal at the paper's settings too."""

    scores = SAMPLES
    tables: ClassVar = {"samples.seen": SEEN}
    described = False
    upstream: str
    comparison: Comparison
    samples: Counts
    seeds: Seeds
    at_papers: Calibration | None = None

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        models = []
        for method, n, seed in product(METHODS, sorted(self.samples), sorted(self.seeds)):
            columns = {"samples": n}
            models += compared_models(self, folder, method, **columns, seed=seed, columns=columns)
        jobs = {model.name: (setup, model, {}) for model in models}
        record = costs(self, setup, jobs, setup.context.suite.workers or 1)
        merged = merged_model(setup, self.upstream).but(columns={"samples": 0})
        rows = score(f"{self.label} score", setup, [merged, *models])
        return StudyResult(rows, {"samples.seen": seen_rows(setup, models, rows)}, record=record)
