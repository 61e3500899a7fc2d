"""The study of what goes beyond the paper. Knows nothing of torch, models or
where results go.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import PositiveInt

from featcal.settings import Calibration, Distinct, Settings, require
from reproduction.experiments.runs import Draw, Names, Pool, Reading, Seeds

OWN = (
    "merged",
    "paper",
    "suite",
)  # variants that are no candidates of what goes beyond: the merger, the paper's method twice
# a variant that every study has: it is for those who have nothing to choose λ, ρ and α with
PRESET = "the preset best"


@dataclass(frozen=True)
class Trial:
    """One calibrated model. settings: None is the merged model itself."""

    upstream: str
    variant: str
    settings: Calibration | None
    samples: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.upstream} {self.variant} n={self.samples} seed={self.seed}"


class BeyondStudy(Settings):
    """Ideas beyond the paper, each alone and together, from several mergers; one is chosen on
    validation samples.

    chosen_on: mergers from which all variants are run; from the other `upstreams` only what was
    chosen there, the preset and the
               paper's method.
    paper, suite: the paper's method with its own and with the suite's λ, ρ and α.   variants: by
    name, what differs from `suite`.
    samples:   of each task; with every seed but the first only the chosen variant and `suite` are
               run.
    few:       other numbers of samples, with which `suite` and the preset are run from the first of
               `chosen_on`.
    reading:   how texts are read, of a language model.
    """

    section = "beyond"
    role: str
    pool: Pool
    upstreams: tuple[str, ...]
    chosen_on: Names
    paper: Calibration
    suite: Calibration
    variants: Mapping[str, Mapping[str, Any]]
    samples: PositiveInt
    few: Annotated[tuple[PositiveInt, ...], Distinct]
    batch: PositiveInt
    seeds: Seeds
    reading: Reading | None = None

    def check(self) -> None:
        fine = set(self.chosen_on) <= set(self.upstreams)
        require(fine, "beyond.chosen_on", self.chosen_on, "must be some of beyond.upstreams")
        require(bool(self.variants), "beyond.variants", self.variants, "must name some")
        always = (*OWN, PRESET)
        for name in self.variants:
            require(
                name not in always,
                "beyond.variants",
                name,
                f"must be none of {', '.join(always)}: always run",
            )
            self.settings(name)

    def settings(self, variant: str) -> Calibration | None:
        """The settings of a variant; None for the merged model. Raises: BadSetting, UnknownKey."""
        if variant in OWN:
            return None if variant == "merged" else getattr(self, variant)
        if variant == PRESET:
            return Calibration.preset("best")
        return Calibration.from_mapping(
            {**dict(self.suite), **self.variants[variant]}, f"beyond.variants.{variant}"
        )

    @property
    def candidates(self) -> tuple[str, ...]:
        """What one is chosen from."""
        return (*self.variants, PRESET)

    def first(self) -> list[Trial]:
        """Every variant from the mergers it is chosen on, with the first seed."""
        return [
            self.trial(u, v, self.samples, self.seeds[0])
            for u in self.chosen_on
            for v in (*OWN, *self.candidates)
        ]

    def further(self, chosen: str) -> list[Trial]:
        """The chosen variant and the paper’s method from the other mergers and with the other
        seeds; the ladder.
        """
        others = [upstream for upstream in self.upstreams if upstream not in self.chosen_on]
        ladder = [n for n in self.few if n != self.samples]
        return [
            *(
                self.trial(u, v, self.samples, self.seeds[0])
                for u in others
                for v in dict.fromkeys((*OWN, PRESET, chosen))
            ),
            *(
                self.trial(u, v, self.samples, s)
                for u in self.upstreams
                for v in (chosen, "suite")
                for s in self.seeds[1:]
            ),
            *(
                self.trial(self.chosen_on[0], v, n, self.seeds[0])
                for v in (PRESET, "suite")
                for n in ladder
            ),
        ]

    def draw(self, trial: Trial) -> Draw:
        """Which training samples a trial calibrates on."""
        return Draw(stream="train", samples=trial.samples, batch=self.batch, seed=trial.seed)

    def trial(self, upstream: str, variant: str, samples: int, seed: int) -> Trial:
        """One model to be made and scored."""
        return Trial(upstream, variant, self.settings(variant), samples, seed)
