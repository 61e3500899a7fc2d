"""An intervention: how much do adapters owe to what all images of a synthetic task share?

A task's images have a fixed pattern and colour added, and are turned, enlarged and mixed in colour.
Here what is added is scaled by s, and the rest by the factor at which the base is as accurate on
validation images as with the suite's own shift. Experts are trained anew for every s.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from featcal.settings import Calibration
from reproduction.engine.context import Setup
from reproduction.engine.score import average, task_scores
from reproduction.engine.spec import main_models
from reproduction.engine.study import StudyResult, score_parts
from reproduction.experiments import Comparison, Each, Study
from reproduction.results import OFFSET, Row
from reproduction.stages.prepare import make_experts, recipes_of


class PatternStudy(Study):
    """Settings of the study.

    strengths: s; 1 is the suite's own shift, with which the others share the base's accuracy.
    factors:   of the rest that are tried where s is not 1.
    """

    scores = OFFSET
    upstreams: tuple[str, ...]
    comparison: Comparison
    paper: Calibration
    strengths: Each[float]
    factors: Each[float]
    samples: PositiveInt
    seed: NonNegativeInt

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        factors = dict.fromkeys(self.strengths, self.factors) | {1.0: (1.0,)}
        jobs = {f"{s:g} {f:g}": (setup, s, f) for s, tried in factors.items() for f in tried}
        scores = setup.context.run(f"{self.label} base", base_accuracy, jobs)
        rows, shifts = list[Row](), dict[str, dict[str, float]]()
        for s in self.strengths:
            gaps = {f: abs(scores[f"{s:g} {f:g}"] - scores["1 1"]) for f in factors[s]}
            factor, name = min(gaps, key=gaps.__getitem__), f"{s:g}"
            shifts[name] = {"moved": factor, "base": scores[f"{s:g} {factor:g}"]}
            experts = trained_experts(setup, folder / name, {"added": s, "moved": factor})
            arguments = (setup, folder / name, {"experts": experts}, partial(main_models, self))
            rows += score_parts(f"{self.label} {name}", *arguments, columns={"strength": name})
        return StudyResult(rows, facts={"shifts": shifts})


def base_accuracy(setup: Setup, added: float, moved: float) -> float:
    """Return the base's average accuracy on validation images, in percent."""
    from reproduction.mini.images import drawn_set

    data = setup.context.suite.data
    arguments = ("validation", data.validation, data.seed, data.strength)

    def read(task: str) -> Any:
        return drawn_set(setup.base, task, *arguments, added=added, moved=moved)

    base = {"base": setup.load(setup.base)}
    return average(task_scores(setup, lambda _: base, read)["base"])


def trained_experts(setup: Setup, folder: Path, scales: Mapping[str, float]) -> Path:
    """Draw images into folder/data and train experts on them; return the folder of these."""
    from reproduction.mini.images import write_parquet
    from reproduction.prepare.sources import SOURCES

    images, experts, suite = folder / "data", folder / "experts", setup.context.suite
    counts = {split: getattr(suite.data, split) for split in ("train", "validation", "test")}
    arguments = (suite.data.seed, suite.data.strength, counts, scales)
    jobs = {task: (task, images / task, *arguments) for task in setup.tasks}
    setup.context.run("draw", write_parquet, jobs)
    copyfile(setup.data / SOURCES, images / SOURCES)
    recipes, folders = recipes_of(setup, setup.tasks), {suite.expert_seed: experts}
    make_experts(setup, setup.prepared, images, recipes, folders)
    return experts
