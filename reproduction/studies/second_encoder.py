"""The main comparison of a sentence encoder with another encoder on the same texts.

Its experts stay with the parts of unfinished stages, so that an interrupted run goes on; what is
made from them is deleted once it is scored.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from featcal.settings import Calibration
from reproduction.engine.context import HEADS, Setup
from reproduction.engine.samples import Selection
from reproduction.engine.score import evaluate_model
from reproduction.engine.study import Found
from reproduction.experiments import (
    AdapterSetting,
    AdaptRun,
    CalibrateRun,
    Experiments,
    Rivals,
    Study,
)
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
        here = setup.moved(folder / "outputs", self.experiments(setup.context.experiments))
        return Found(compared(f"second encoder {self.key}", here, parts, evaluate))

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

    def experiments(self, known: Experiments) -> Experiments:
        """Return the study's mergers, each with FeatCal at both settings and both adapters."""
        rivals, seeds, calibrate, adapt = self.rivals, (self.seed,), {}, {}
        runs = known.merged_in(self.role, self.pool).items()
        merge = {key: one for key, one in runs if one.upstream in self.upstreams}
        for key, one in merge.items():
            start: dict[str, Any] = {"role": self.role, "pool": self.pool, "upstream": one.upstream}
            drawn = {"samples": self.samples, "batch": rivals.batch, "seeds": seeds}
            for setting, own in ((rivals.setting, rivals.featcal), ("paper", self.paper)):
                run = CalibrateRun(**start, setting=setting, calibration=own, **drawn)
                calibrate[f"{key}-{setting}"] = run
            for method in ("surgery", "prob_surgery"):
                draw, training = (
                    rivals.draw(method, self.samples, self.seed),
                    getattr(rivals, method),
                )
                chosen = AdapterSetting(training=training, draw=draw, seeds=seeds)
                settings = {rivals.setting: chosen}
                adapt[f"{key}-{method}"] = AdaptRun(**start, method=method, settings=settings)
        return replace(known, merge=merge, calibrate=calibrate, adapt=adapt, multitask={})
