"""An intervention: a fixed offset per task in the inputs of a sentence encoder, which its experts undo."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from pydantic import NonNegativeInt, PositiveInt

from featcal.settings import Calibration
from reproduction.engine.context import Setup
from reproduction.engine.samples import Selection
from reproduction.engine.spec import ModelSpec, compared_models, merged_model
from reproduction.engine.study import StudyResult, score_parts
from reproduction.experiments import ADAPTERS, Comparison, Each, Study
from reproduction.prepare.offset import at_positions, first_positions, offset_models
from reproduction.results import OFFSET, Row


class OffsetStudy(Study):
    """Settings. strengths: s; offsets of 1 deviate as much as entries of word embeddings."""

    scores = OFFSET
    upstream: str
    comparison: Comparison
    paper: Calibration
    strengths: Each[float]
    samples: PositiveInt
    seed: NonNegativeInt
    scored: PositiveInt

    def models(self, setup: Setup) -> Iterator[ModelSpec]:
        """Yield the merged model, FeatCal at both settings, the experts, and adapters."""
        folder = setup.folder("studied")
        yield merged_model(setup, self.upstream).but(seed=self.seed)
        yield from reversed(compared_models(self, folder, "featcal"))
        yield ModelSpec("expert", None, "expert", seed=self.seed)
        yield from compared_models(self, folder, *ADAPTERS)

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        firsts, rows = first_positions(setup.tasks), list[Row]()
        moved = replace(setup, change=partial(at_positions, firsts))
        selection = Selection("test", self.scored, self.seed)
        jobs = {f"{s:g}": (setup.base, setup.experts, s, self.seed, folder) for s in self.strengths}
        parts_by_strength = setup.context.run(f"{self.label} models", offset_models, jobs)
        for name, parts in parts_by_strength.items():
            args, columns = (moved, folder / name, parts, self.models), {"strength": name}
            rows += score_parts(f"{self.label} {name}", *args, columns=columns, selection=selection)
        return StudyResult(rows)
