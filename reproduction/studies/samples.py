"""Tables 12 and 13, Figure 3: accuracy and cost of the rivals by the number of samples per task.

First every calibration, each alone in a process of its own, then one pass over the test samples;
no time and no memory includes an evaluation.
"""

from itertools import product
from pathlib import Path
from typing import ClassVar

from reproduction.engine.context import Setup
from reproduction.engine.measured import METHODS, measure
from reproduction.engine.samples import seen_rows
from reproduction.engine.spec import merged_model, rival
from reproduction.engine.study import StudyResult, rows_of
from reproduction.engine.workers import fan_out
from reproduction.experiments import Counts, Rivals, Seeds, Study
from reproduction.results import SAMPLES, SEEN


class SamplesStudy(Study):
    """Settings of the study."""

    section = "samples"
    scores = SAMPLES
    tables: ClassVar = {"samples.seen": SEEN}
    described = False
    upstream: str
    rivals: Rivals
    samples: Counts
    seeds: Seeds

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        label, rivals = f"samples {self.key}", self.rivals
        models = []
        for method, n, seed in product(METHODS, sorted(self.samples), sorted(self.seeds)):
            given = (rivals, method, self.upstream, n, seed, folder / f"{method}-{n}-{seed}")
            models.append(rival(*given, columns={"samples": n}))
        longest_first = sorted(models, key=lambda model: -model.columns["samples"])
        jobs = {model.name: (setup, model) for model in longest_first}
        workers = setup.context.suite.workers
        n_jobs, threads = (workers, 1) if workers else (1, None)
        costs = dict(fan_out(label, measure, jobs, n_jobs, threads, fresh=True))
        merged = merged_model(setup, self.upstream).but(columns={"samples": 0})
        rows = rows_of(setup, label, [merged, *models])
        draws = [rivals.draw("surgery", n, seed) for n in self.samples for seed in self.seeds]
        record = {"cost": [costs[model.name] for model in models], "at_once": n_jobs}
        record |= {"threads": threads, "settings": self.model_dump()}
        return StudyResult(rows, {"samples.seen": seen_rows(setup, draws, rows)}, record=record)
