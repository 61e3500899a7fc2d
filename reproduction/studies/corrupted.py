"""Table 6, Figure 4: calibration on corrupted samples, scored on clean test samples."""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import ClassVar, Literal, get_args

from pydantic import PositiveInt

from featcal.settings import Calibration, require
from reproduction.engine.context import Setup
from reproduction.engine.examples import examples
from reproduction.engine.make import make
from reproduction.engine.samples import damaged, seen_rows
from reproduction.engine.score import score
from reproduction.engine.spec import compared_models
from reproduction.engine.study import StudyResult
from reproduction.experiments import Comparison, Each, Seeds, Study
from reproduction.prepare.damage import corruption_strengths, damage_strengths
from reproduction.results import CORRUPTED, EXAMPLES, SEEN

Corruption = Literal["gaussian_noise", "motion_blur", "fog"]
TextCorruption = Literal["typing_errors", "dropped_words", "swapped_words"]


class CorruptedStudy(Study):
    """Settings of the study.

    severity: 3 of images; one or more of 1, 2 and 3 of texts.   clean: the same on clean samples.
    at_papers: FeatCal at the paper's settings as well.
    """

    scores = CORRUPTED
    pictured = True
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
            pictures, legend = examples(setup, self.damages, self.samples, self.seeds[0])
            strengths = corruption_strengths(pictures[0][0].shape[-1])
        tables = {"corrupted.seen": seen_rows(setup, models, rows), "corrupted.examples": legend}
        return StudyResult(rows, tables, {"strengths": strengths}, pictures=pictures)
