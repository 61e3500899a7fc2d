"""Tables 12 and 13, Figure 3: accuracy and cost of the rivals by the number of samples per task.

First every calibration, each alone in a process of its own, then one pass over the test samples;
no time and no memory includes an evaluation.
"""

from pathlib import Path
from typing import ClassVar

from reproduction.engine.context import Setup
from reproduction.engine.measured import METHODS, Method, measure, merged_model
from reproduction.engine.samples import seen_rows
from reproduction.engine.score import score
from reproduction.engine.study import Found
from reproduction.engine.workers import alone
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

    def found(self, setup: Setup, folder: Path) -> Found:
        """Return scores, the test samples that were seen, and costs."""
        label, rivals = f"samples {self.key}", self.rivals
        chosen = [
            Method(method, self.upstream, n, seed, rivals)
            for method in METHODS
            for n in sorted(self.samples)
            for seed in sorted(self.seeds)
        ]
        folders = {one.name: folder / f"{number:03d}" for number, one in enumerate(chosen)}
        longest_first = sorted(chosen, key=lambda one: -one.samples)
        jobs = {one.name: (setup, one, folders[one.name]) for one in longest_first}
        workers = setup.context.suite.workers
        n_jobs, threads = (workers, 1) if workers else (1, None)
        costs = dict(alone(label, measure, jobs, n_jobs, threads))
        models = [merged_model(setup, self.upstream).but(columns={"samples": 0})]
        models += [one.spec(folders[one.name], samples=one.samples) for one in chosen]
        scores = score(f"{label} score", setup, models)
        rows = [row for model in models for row in scores[model.name]]
        draws = [rivals.draw("surgery", n, seed) for n in self.samples for seed in self.seeds]
        record = {"cost": [costs[one.name] for one in chosen], "at_once": n_jobs}
        record |= {"threads": threads, "settings": self.model_dump()}
        return Found(rows, {"samples.seen": seen_rows(setup, draws, rows)}, record=record)
