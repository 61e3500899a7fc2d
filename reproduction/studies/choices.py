"""What the paper leaves open for language models: one choice changed at a time, on test texts.

The scores are for the report only: no default was chosen by them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveInt

from featcal.settings import Calibration, Distinct, require
from reproduction.engine.context import Setup
from reproduction.engine.spec import ModelSpec
from reproduction.engine.study import Found, made_and_scored
from reproduction.experiments import DOMAIN_POOL, GLUE_POOL, Reading, Setting, Study
from reproduction.results import CHOICES

READ = ("split", "decoder", "counted", "tokens")  # fields of Reading
KNOWN = (*READ, "modules", "samples")
ONLY_IN = {"decoder": GLUE_POOL, "counted": DOMAIN_POOL}  # choices of the models of one pool


class Variant(NamedTuple):
    """One calibrated language model. choice, option: what was changed, and to what; "": nothing."""

    choice: str
    option: str
    calibration: Calibration
    reading: Reading
    samples: int
    seed: int


class ChoicesStudy(Study):
    """Settings of the study: the default at every seed, and every option at the first.

    seeds: at least two, as their spread is the noise.
    vary:  by choice, the options that are not the default; of `modules`, lists by their name.
    """

    section = "choices"
    scores = CHOICES
    upstream: str
    setting: Setting
    featcal: Calibration
    reading: Reading
    samples: PositiveInt
    batch: PositiveInt
    seeds: Annotated[tuple[NonNegativeInt, ...], Field(min_length=2), Distinct]
    vary: Mapping[str, Any]

    def check(self) -> None:
        require(bool(self.vary), "choices.vary", self.vary, "must be a mapping of choices")
        for choice, options in self.vary.items():
            place, expected = f"choices.vary.{choice}", f"must be one of {', '.join(KNOWN)}"
            require(choice in KNOWN, "choices.vary", choice, expected)
            only = ONLY_IN.get(choice, self.pool)
            require(only == self.pool, place, choice, f"is a choice of the pool {only} alone")
            fine = isinstance(options, dict if choice == "modules" else list | tuple)
            expected = "must be a list; of modules, lists of names by what each is called"
            require(fine and bool(options), place, options, expected)
        default, *_ = variants = list(self.variants())
        for one in variants:
            same = one._replace(choice="", option="", seed=default.seed) == default
            place = f"choices.vary.{one.choice}"
            require(same == (not one.choice), place, one.option, "is the default itself")

    def variants(self) -> Iterator[Variant]:
        """Yield the default at each seed, then one variant for each option. Raises: BadSetting."""
        for seed in self.seeds:
            yield Variant("", "", self.featcal, self.reading, self.samples, seed)
        first = Variant("", "", self.featcal, self.reading, self.samples, self.seeds[0])
        for choice, options in self.vary.items():
            named = options if isinstance(options, Mapping) else {str(one): one for one in options}
            for option, value in named.items():
                changed: dict[str, Any] = {"samples": value}
                if choice in READ:
                    changed = {"reading": self.reading.but(**{choice: value})}
                elif choice == "modules":
                    changed = {"calibration": self.featcal.but(modules=value)}
                else:
                    fine = type(value) is int and value > 0
                    expected = "must be a whole number, at least 1"
                    require(fine, "choices.vary.samples", value, expected)
                yield first._replace(choice=choice, option=option, **changed)

    def models(self, folder: Path) -> Iterator[ModelSpec]:
        """Yield every variant as a model."""
        for one in self.variants():
            name = f"{one.choice or 'default'}-{one.option or one.seed}"
            draw = self.drawn(samples=one.samples, seed=one.seed)
            words = ("featcal", self.upstream, self.setting, one.seed, one.calibration, draw)
            columns = {"choice": one.choice, "option": one.option, "default": int(not one.choice)}
            yield ModelSpec(name, folder / name, *words, reading=one.reading, columns=columns)

    def found(self, setup: Setup, folder: Path) -> Found:
        """Return rows of every variant."""
        models = list(self.models(folder))
        return Found(made_and_scored(setup, f"choices {self.key}", models))
