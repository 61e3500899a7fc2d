"""The main comparison of a sentence encoder with another encoder on the same texts."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from featcal.settings import Calibration
from reproduction.engine.context import HEADS, Setup
from reproduction.engine.samples import Selection
from reproduction.engine.spec import main_models
from reproduction.engine.study import StudyResult, score_parts
from reproduction.experiments import Comparison, Study
from reproduction.prepare.suite import FineTuneSentences, SentenceRole
from reproduction.results import SCORES
from reproduction.stages.prepare import make_store


class SecondEncoderStudy(Study):
    """Settings; `fine_tune` is of the experts, `scored` the test samples of each task."""

    scores = SCORES
    from_prepared = False
    model: str
    fine_tune: Mapping[str, Any]
    upstreams: tuple[str, ...]
    comparison: Comparison
    paper: Calibration
    samples: PositiveInt
    seed: NonNegativeInt
    scored: PositiveInt

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        suite, location = setup.context.suite, f"second_encoder.{self.key}.fine_tune"
        recipe = FineTuneSentences.from_mapping(self.fine_tune, location)
        suite = suite.but(sentences=suite.sentences.but(fine_tune=recipe))
        changed = replace(setup, context=replace(setup.context, suite=suite))
        store = make_store(changed, SentenceRole(model=self.model), f"second_encoder-{setup.key}")
        parts = {name: store / name for name in ("base", "experts", HEADS)}
        selection = Selection("test", self.scored, self.seed)
        arguments = (setup, folder / "outputs", parts, partial(main_models, self))
        return StudyResult(score_parts(self.label, *arguments, selection=selection))
