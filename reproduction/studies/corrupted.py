"""Table 6, Figure 4: calibration on corrupted samples, scored on clean test samples."""

from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, PositiveInt

from featcal.settings import Calibration, require
from reproduction.engine.context import Setup
from reproduction.engine.samples import damaged, load_split, seen_rows
from reproduction.engine.spec import ModelSpec, compared_models, merged_model
from reproduction.engine.study import StudyResult, make_and_score
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

    section = "corrupted"
    scores = CORRUPTED
    tables: ClassVar = {"corrupted.seen": SEEN, "corrupted.examples": EXAMPLES}
    upstream: str
    comparison: Comparison
    corruptions: Each[Corruption] | Each[TextCorruption]
    severity: int | Each[Annotated[int, Field(ge=1, le=3)]]
    samples: PositiveInt
    seeds: Seeds
    clean: bool = False
    at_papers: Calibration | None = None

    def check(self) -> None:
        valid = isinstance(self.severity, tuple) if self.of_texts else self.severity == 3
        expected = "must be 3, as the paper has it, or of texts a list of 1, 2 and 3"
        require(valid, "corrupted.severity", self.severity, expected)

    @property
    def of_texts(self) -> bool:
        return self.corruptions[0] in get_args(TextCorruption)

    @property
    def damages(self) -> list[str]:
        """Return the names of all damages; of texts with the strength at the end."""
        levels = [f"-{n}" for n in self.severity] if isinstance(self.severity, tuple) else [""]
        return [corruption + level for corruption, level in product(self.corruptions, levels)]

    def models(self, folder: Path) -> list[ModelSpec]:
        """Return FeatCal and adapters on every damage; adapters also on FeatCal's samples."""
        adapters, streams, models = ("prob_surgery", "surgery"), self.comparison.streams[1:], []
        damages = [*([""] if self.clean else []), *self.damages]
        for seed, damage in product(self.seeds, damages):
            columns = {"corruption": damage or "clean"}
            shared: dict[str, Any] = {"seed": seed, "damage": damage, "columns": columns}
            models += compared_models(self, folder, *adapters, "featcal", **shared)
            models += compared_models(self, folder, *adapters, streams=streams, **shared)
        return models

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        from reproduction.prepare.damage import corruption_strengths, damage_strengths

        models, merged = self.models(folder), merged_model(setup, self.upstream)
        rows = make_and_score(setup, self.label, models, corrected=[merged])
        draws = [self.comparison.draw("surgery", self.samples, seed) for seed in self.seeds]
        if self.of_texts:
            pictures, legend, strengths = [], [], damage_strengths()
        else:
            pictures, legend = examples(setup, self)
            strengths = corruption_strengths(pictures[0][0].shape[-1])
        tables = {"corrupted.seen": seen_rows(setup, draws, rows), "corrupted.examples": legend}
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
        rows = [np.concatenate(row, axis=2) for row in result.pictures]
        sheet = np.concatenate(rows, axis=1).transpose(1, 2, 0)
        image, side = Image.fromarray(np.ascontiguousarray(sheet)), rows[0].shape[1]
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
        versions |= {name: damaged(samples, task, name, seed) for name in study.damages}
        pictures.append([version.pixels[first][0] for version in versions.values()])
        keys = {"task": task, "index": int(first[0]), "row": row}
        legend += [{**keys, "corruption": n, "column": c} for c, n in enumerate(versions)]
    return pictures, legend
