"""The main comparison of a sentence encoder with another encoder on the same texts.

Its experts stay with the parts of unfinished stages, so that an interrupted run goes on; what is
made from them is deleted once it is scored.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from featcal.settings import Calibration
from reproduction.engine.context import HEADS, Setup
from reproduction.engine.samples import Selection
from reproduction.engine.score import evaluate_model
from reproduction.engine.spec import ModelSpec, merged, references, rival
from reproduction.engine.study import Found
from reproduction.experiments import Rivals, Study
from reproduction.prepare.experts import model_folder
from reproduction.prepare.suite import FineTuneSentences
from reproduction.results import SCORES
from reproduction.stages.prepare import (
    FIRST,
    make_sentence_experts,
    make_sentence_heads,
    sentence_digest,
)
from reproduction.studies.expert_seeds import compared


class SecondEncoderStudy(Study):
    """Settings of the study.

    model:     as a role of the suite names it.
    fine_tune: settings of its experts (FineTuneSentences).
    scored:    test samples of each task.
    """

    section = "second_encoder"
    scores = SCORES
    from_prepared = False
    model: str
    fine_tune: Mapping[str, Any]
    upstreams: tuple[str, ...]
    rivals: Rivals
    paper: Calibration
    samples: PositiveInt
    seed: NonNegativeInt
    scored: PositiveInt

    def found(self, setup: Setup, folder: Path) -> Found:
        """Return rows of base, experts, merged and calibrated models, and of adapters."""
        store = self.trained(setup)
        parts = {name: store / name for name in ("base", "experts", HEADS)}
        evaluate = partial(evaluate_model, selection=Selection("test", self.scored, self.seed))
        here, label = setup.moved(folder / "outputs"), f"second encoder {self.key}"
        return Found(compared(label, here, parts, list(self.models(here)), evaluate))

    def trained(self, setup: Setup) -> Path:
        """Return a folder with base/, heads and experts/<task>/, those that are missing trained."""
        layout, suite = setup.context.layout, setup.context.suite
        encoder = model_folder(layout.root, self.model, layout.pins)
        recipe = FineTuneSentences.from_mapping(
            self.fine_tune, f"second_encoder.{self.key}.fine_tune"
        )
        suite = suite.but(sentences=suite.sentences.but(fine_tune=recipe))
        here = replace(setup, context=replace(setup.context, suite=suite))
        digest = sentence_digest(here, encoder, (FIRST,))
        store = layout.unfinished(f"second_encoder-{self.key}-{digest}")
        make_sentence_heads(here, encoder, store)
        outs = {(task, FIRST): store / "experts" / task for task in setup.tasks}
        make_sentence_experts(here, store, outs)
        return store

    def models(self, setup: Setup) -> Iterator[ModelSpec]:
        """Yield the references and the study's mergers, with FeatCal at both settings and adapters."""
        rivals = self.rivals
        mergers = [model for model in merged(setup) if model.upstream in self.upstreams]
        yield from (model for model in references(setup) if model.method != "multitask")
        yield from mergers
        ways = [("featcal", setting) for setting in dict.fromkeys((rivals.setting, "paper"))]
        adapters = [(method, rivals.setting) for method in ("surgery", "prob_surgery")]
        for group in (ways, adapters):
            for model, (method, setting) in product(mergers, group):
                out = setup.folder("studied", f"{model.name}-{method}-{setting}")
                made = rival(rivals, method, model.upstream, self.samples, self.seed, out)
                made = made.but(corrects=model.name if made.corrects else "")
                at_papers = {"setting": "paper", "settings": self.paper}
                yield made.but(**at_papers) if setting == "paper" else made
