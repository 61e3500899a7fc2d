"""An intervention: how much do adapters owe to what all images of a synthetic task share?

A task's images have a fixed pattern and colour added, and are turned, enlarged and mixed in colour.
Here what is added is scaled by s, and the rest by the factor at which the base is as accurate on
validation images as with the suite's own shift. Experts are trained anew for every s.
"""

from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path
from shutil import copyfile, rmtree

from pydantic import NonNegativeInt, PositiveInt

from featcal.settings import Calibration
from reproduction.engine.context import HEADS, Setup
from reproduction.engine.score import Row, averages
from reproduction.engine.study import StudyResult
from reproduction.experiments import Each, Rivals, Study
from reproduction.prepare.experts import ExpertJob
from reproduction.prepare.suite import FINE_TUNE
from reproduction.results import OFFSET
from reproduction.stages.prepare import make_experts, recipes_of
from reproduction.studies.expert_seeds import compared
from reproduction.studies.second_encoder import main_models

SOURCES = "sources.json"


class PatternStudy(Study):
    """Settings of the study.

    strengths: s; 1 is the suite's own shift, with which the others share the base's accuracy.
    factors:   of the rest that are tried where s is not 1.
    """

    section = "pattern"
    scores = OFFSET
    upstreams: tuple[str, ...]
    rivals: Rivals
    paper: Calibration
    strengths: Each[float]
    factors: Each[float]
    samples: PositiveInt
    seed: NonNegativeInt

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        label, tried = f"pattern {self.key}", [(1.0, 1.0), *product(self.strengths, self.factors)]
        jobs = {f"{s:g} {factor:g}": (setup, s, factor) for s, factor in tried}
        found = setup.context.run(f"{label} base", base_accuracy, jobs)
        rows, shifts = list[Row](), dict[str, dict[str, float]]()
        for s in self.strengths:
            far = {
                f: abs(found[f"{s:g} {f:g}"] - found["1 1"]) for f in (self.factors, (1.0,))[s == 1]
            }
            factor = min(far, key=far.__getitem__)
            shifts[f"{s:g}"] = {"moved": factor, "base": found[f"{s:g} {factor:g}"]}
            aside = folder / f"{s:g}"
            parts = trained(f"{label} {s:g}", setup, aside, {"added": s, "moved": factor})
            models = partial(main_models, self)
            made = compared(f"{label} {s:g}", setup, aside, parts, models)
            rows += [{**row, "strength": f"{s:g}"} for row in made]
            rmtree(aside)
        return StudyResult(rows, facts={"shifts": shifts})


def base_accuracy(setup: Setup, added: float, moved: float) -> float:
    """Return the base's average accuracy on validation images, in percent."""
    from featcal.data.images import ImageSet, Preprocess
    from reproduction.mini.images import draw_split

    data, preprocess = setup.context.suite.data, Preprocess.from_folder(setup.base)

    def read(task: str) -> ImageSet:
        given = (task, "validation", data.validation, data.seed, data.strength)
        images, labels = draw_split(*given, added=added, moved=moved)
        return ImageSet(images.transpose(0, 3, 1, 2), preprocess, labels)

    return averages(setup, {1.0: setup.load(setup.base)}, read)[1.0]


def trained(label: str, setup: Setup, aside: Path, parts: Mapping[str, float]) -> dict[str, Path]:
    """Draw images and train experts on them; return the folders of base, heads and experts."""
    from reproduction.mini.images import write_parquet

    data, context, prepared = setup.context.suite.data, setup.context, setup.prepared
    counts = {split: getattr(data, split) for split in ("train", "validation", "test")}
    given, images = (data.seed, data.strength, counts, parts), aside / "data"
    context.run(f"{label} draw", write_parquet, {t: (t, images / t, *given) for t in setup.tasks})
    copyfile(setup.data / SOURCES, images / SOURCES)
    jobs = {}
    for task, recipe in recipes_of(setup, setup.tasks).items():
        seed, device = context.suite.expert_seed, context.suite.device
        job = ExpertJob(task, FINE_TUNE, recipe, seed, device)
        jobs[task] = (job, aside / "experts" / task)
    make_experts(setup, prepared, images, jobs)
    return {name: prepared / name for name in ("base", HEADS)} | {"experts": aside / "experts"}
