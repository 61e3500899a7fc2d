"""The study of what the paper leaves open for language models as settings: one choice
changed at a time.

Knows nothing of torch, models or where results go.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt

from featcal.settings import Calibration, Distinct, Settings, require
from reproduction.experiments.runs import (
    DOMAIN_POOL,
    GLUE_POOL,
    CalibrateRun,
    Pool,
    Reading,
    Setting,
)

READ = ("split", "decoder", "counted", "tokens")  # what of the texts is read
CHOICES = (*READ, "modules", "samples")
APART = {
    "decoder": GLUE_POOL,
    "counted": DOMAIN_POOL,
}  # a choice that only the models of one pool have


@dataclass(frozen=True)
class Variant:
    """One calibrated model of the study: how its texts are read, what is solved, and its draw.

    choice, option: what was changed, and to what; both empty for the default.
    """

    choice: str
    option: str
    calibration: Calibration
    reading: Reading
    samples: int
    seed: int

    @property
    def name(self) -> str:
        """Unique in the study."""
        return f"{self.choice or 'default'}-{self.option or self.seed}"


class ChoicesStudy(Settings):
    """The default at every seed, and at the first seed every option of `vary` in its place.

    seeds: two or more, as their spread is the noise.
    vary: by choice the options that are not the default; of `modules` lists of names, by what the
    option is called.
    """

    section = "choices"
    role: str
    pool: Pool
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
            require(
                choice in CHOICES, "choices.vary", choice, f"must be one of {', '.join(CHOICES)}"
            )
            fitting = APART.get(choice, self.pool) == self.pool
            require(
                fitting,
                f"choices.vary.{choice}",
                choice,
                f"is a choice of the pool {APART.get(choice)} alone",
            )
            fine = isinstance(options, dict if choice == "modules" else list | tuple) and bool(
                options
            )
            require(
                fine,
                f"choices.vary.{choice}",
                options,
                "must be a list; of modules, lists of names by what each is called",
            )
        for variant in self.variants():
            own = replace(variant, choice="", option="", seed=self.seeds[0]) == self._default(
                self.seeds[0]
            )
            require(
                own == (not variant.choice),
                f"choices.vary.{variant.choice}",
                variant.option,
                "is the default itself",
            )

    def variants(self) -> Iterator[Variant]:
        """Every model: the default at each seed, then one for each option. Raises: BadSetting for
        an option that cannot be.
        """
        yield from map(self._default, self.seeds)
        first = self._default(self.seeds[0])
        for choice, options in self.vary.items():
            named = (
                options
                if isinstance(options, Mapping)
                else {str(option): option for option in options}
            )
            for option, value in named.items():
                yield replace(first, choice=choice, option=option, **self._changed(choice, value))

    def run(self, variant: Variant) -> CalibrateRun:
        """A variant as an experiment with one calibrated model is described."""
        return CalibrateRun(
            role=self.role,
            pool=self.pool,
            upstream=self.upstream,
            setting=self.setting,
            calibration=variant.calibration,
            samples=variant.samples,
            batch=self.batch,
            seeds=(variant.seed,),
            reading=variant.reading,
        )

    def _default(self, seed: int) -> Variant:
        return Variant("", "", self.featcal, self.reading, self.samples, seed)

    def _changed(self, choice: str, value: Any) -> dict[str, Any]:
        """What of a variant differs from the default."""
        if choice in READ:
            return {"reading": self.reading.but(**{choice: value})}
        if choice == "modules":
            return {"calibration": self.featcal.but(modules=value)}
        fine = type(value) is int and value > 0
        require(fine, "choices.vary.samples", value, "must be a whole number, at least 1")
        return {"samples": value}
