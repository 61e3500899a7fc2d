"""Table 6, Figure 4: calibration on corrupted samples, scored on clean test samples."""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pydantic import PositiveInt

from featcal.settings import Calibration, require
from reproduction.engine.context import Setup
from reproduction.engine.make import make
from reproduction.engine.samples import damaged, load_split, seen_rows
from reproduction.engine.score import score
from reproduction.engine.spec import compared_models
from reproduction.engine.study import StudyResult
from reproduction.experiments import Comparison, Each, Seeds, Study
from reproduction.results import CORRUPTED, EXAMPLES, SEEN, Row

Corruption = Literal["gaussian_noise", "motion_blur", "fog"]
TextCorruption = Literal["typing_errors", "dropped_words", "swapped_words"]
LARGEST = 96  # pixels of an example: enough to see the damage, small enough for git


class CorruptedStudy(Study):
    """Settings of the study.

    severity: 3 of images; one or more of 1, 2 and 3 of texts.   clean: the same on clean samples.
    at_papers: FeatCal at the paper's settings as well.
    """

    scores = CORRUPTED
    tables: ClassVar = {"corrupted.seen": SEEN, "corrupted.examples": EXAMPLES}
    upstream: str
    comparison: Comparison
    corruptions: Each[Corruption] | Each[TextCorruption]
    severity: Literal[3] | Each[Literal[1, 2, 3]]
    samples: PositiveInt
    seeds: Seeds
    clean: bool = False
    at_papers: Calibration | None = None

    def check(self) -> None:
        expected = "must be 3, as the paper has it, or of texts a list of 1, 2 and 3"
        listed = isinstance(self.severity, tuple)
        require(listed == self.of_texts, "corrupted.severity", self.severity, expected)

    @property
    def of_texts(self) -> bool:
        return self.corruptions[0] in get_args(TextCorruption)

    @property
    def damages(self) -> list[str]:
        """Return the names of all damages; of texts with the strength at the end."""
        levels = [f"-{n}" for n in self.severity] if isinstance(self.severity, tuple) else [""]
        return [corruption + level for corruption, level in product(self.corruptions, levels)]

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        from reproduction.prepare.damage import corruption_strengths, damage_strengths

        adapters, models = ("prob_surgery", "surgery"), []
        for seed, damage in product(self.seeds, [*([""] if self.clean else []), *self.damages]):
            suffix, columns = damage and f"-{damage}", {"corruption": damage or "clean"}
            fields = {"seed": seed, "suffix": suffix, "columns": columns}
            compared = partial(compared_models, self, folder, **fields)
            made = compared(*adapters, "featcal")
            made += compared(*adapters, streams=self.comparison.streams[1:])  # on FeatCal's samples
            change = partial(damaged, damage=damage, seed=seed) if damage else None
            make(self.label, replace(setup, change=change), made)
            models += made
        rows = score(f"{self.label} score", setup, models)
        if self.of_texts:
            pictures, legend, strengths = [], [], damage_strengths()
        else:
            pictures, legend = examples(setup, self)
            strengths = corruption_strengths(pictures[0][0].shape[-1])
        tables = {"corrupted.seen": seen_rows(setup, models, rows), "corrupted.examples": legend}
        return StudyResult(rows, tables, {"strengths": strengths}, pictures=pictures)

    @staticmethod
    def finish(folder: Path, result: StudyResult) -> None:
        """Write examples (3, H, W) as one PNG without gaps; one white pixel for none."""
        import numpy as np
        from PIL import Image

        path = folder / "corrupted.examples.png"
        if not result.pictures:
            Image.new("RGB", (1, 1), "white").save(path)
            return
        sheet = np.ascontiguousarray(np.block(result.pictures).transpose(1, 2, 0))
        image, side = Image.fromarray(sheet), result.pictures[0][0].shape[1]
        if side > LARGEST:
            size = (image.width * LARGEST // side, image.height * LARGEST // side)
            image = image.resize(size, Image.Resampling.BOX)
        image.save(path, optimize=True)


def examples(setup: Setup, study: CorruptedStudy) -> tuple[list[Any], list[Row]]:
    """Return pictures of some tasks' first samples, clean and damaged, and a row for each."""
    from featcal.data.batches import draw_indices

    seed, pictures, legend = study.seeds[0], [], list[Row]()
    for row, task in enumerate(setup.tasks[1::2]):
        samples = load_split(setup, task, "train")
        first = draw_indices(task, len(samples.labels), study.samples, seed)[:1]
        versions = {"clean": samples}
        versions |= {name: damaged(task, samples, name, seed) for name in study.damages}
        pictures.append([version.pixels[first][0] for version in versions.values()])
        keys = {"task": task, "index": int(first[0]), "row": row}
        legend += [{**keys, "corruption": n, "column": c} for c, n in enumerate(versions)]
    return pictures, legend
