"""Choices for language models that the paper does not state, changed one at a time."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from featcal.settings import Calibration, Distinct, require
from reproduction.engine.context import Setup
from reproduction.engine.spec import ModelSpec, featcal_at
from reproduction.engine.study import StudyResult, make_and_score
from reproduction.experiments import DOMAIN_POOL, GLUE_POOL, Each, Names, Reading, Setting, Study
from reproduction.results import CHOICES

Choice = Literal["split", "decoder", "counted", "tokens", "modules", "samples"]
# A list; of modules, lists of names by what each is called.
Options = Annotated[Mapping[str, Names], Field(min_length=1)] | Each[str | int]
ONLY_IN = {"decoder": GLUE_POOL, "counted": DOMAIN_POOL}  # choices of the models of one pool


class ChoicesStudy(Study):
    """The default at every seed, which is the noise, and each option of `vary` at the first."""

    scores = CHOICES
    upstream: str
    setting: Setting
    featcal: Calibration
    reading: Reading
    samples: PositiveInt
    batch: PositiveInt
    seeds: Annotated[tuple[NonNegativeInt, ...], Field(min_length=2), Distinct]
    vary: Annotated[Mapping[Choice, Options], Field(min_length=1)]

    def check(self) -> None:
        for choice in self.vary:
            only, location = ONLY_IN.get(choice, self.pool), f"choices.vary.{choice}"
            require(only == self.pool, location, choice, f"is a choice of the pool {only} alone")
        default, *models = self.models()
        for model in models[len(self.seeds) - 1 :]:
            values = (model.settings, model.reading, model.draw)
            changed = values != (default.settings, default.reading, default.draw)
            location = f"choices.vary.{model.columns['choice']}"
            require(changed, location, model.columns["option"], "is the default itself")

    def models(self, folder: Path = Path()) -> Iterator[ModelSpec]:
        """Yield the default at each seed, then a model for each option. Raises: BadSetting."""
        for seed in self.seeds:
            yield self.model(folder, "", "", seed)
        for choice, options in self.vary.items():
            by_name = options if isinstance(options, Mapping) else {str(o): o for o in options}
            for option, value in by_name.items():
                yield self.model(folder, choice, option, self.seeds[0], **{choice: value})

    def model(self, folder: Path, choice: str, option: str, seed: int, **change: Any) -> ModelSpec:
        """Return the default, or the default with one choice changed."""
        reading = self.reading.but(**(change if choice in Reading.model_fields else {}))
        settings = self.featcal.but(**(change if choice == "modules" else {}))
        draw = self.featcal_draw(seed=seed).but(**(change if choice == "samples" else {}))
        name = f"{choice or 'default'}-{option or seed}"
        columns = {"choice": choice, "option": option, "default": int(not choice)}
        fields = {"seed": seed, "draw": draw, "reading": reading, "columns": columns}
        return featcal_at(self, folder, name, settings, **fields)

    def run(self, setup: Setup, folder: Path) -> StudyResult:
        return StudyResult(make_and_score(self.label, setup, list(self.models(folder))))
