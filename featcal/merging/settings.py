"""What each merging method can be told, with its source's values as defaults; checked when it is made.

Knows nothing of torch, so that params.yaml is checked before anything heavy is loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypedDict

from featcal.errors import UnknownKey
from featcal.settings import from_mapping, number, require, whole_number

# rows are words here, so models with other words in them differ in shape, and a row's direction says nothing of features
VOCABULARY = ("*shared.weight", "*embed_tokens.weight", "*token_embedding.weight", "*wte.weight", "*word_embeddings.weight",
              "*lm_head.weight", "*lm_head.bias")  # fmt: skip
WUDI_STEPS = {"fusion_bench": 400, "official": 300, "closed_form": 0}


def is_vocabulary(name: str, patterns: tuple[str, ...] = VOCABULARY) -> bool:
    """Whether a tensor has one row per word, told from its name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Average:
    """θ = (1/N) Σ θᵢ: nothing to set."""


@dataclass(frozen=True)
class TaskArithmetic:
    """scale: s of θ₀ + s Σ τᵢ; 0.3 for eight tasks."""

    scale: float = 0.3

    def __post_init__(self) -> None:
        number("merge.scale", self.scale)


@dataclass(frozen=True)
class Ties:
    """density: share of each task vector that is kept, the largest by magnitude.

    scale:   of the merged task vector.
    combine: how what agrees with the elected sign is put together: "sum" (FusionBench, whose recipes the paper follows) or "mean"
             (the disjoint mean of the method's own paper, which takes scale=1).
    """

    density: float = 0.2
    scale: float = 0.3
    combine: Literal["sum", "mean"] = "sum"

    def __post_init__(self) -> None:
        for key in ("density", "scale"):
            number(f"merge.{key}", getattr(self, key))
        require(0 < self.density <= 1, "merge.density", self.density, "must lie above 0 and be at most 1")
        require(self.combine in ("sum", "mean"), "merge.combine", self.combine, "must be sum or mean")


@dataclass(frozen=True)
class Wudi:
    """variant: "fusion_bench" (the paper's: every matrix, 400 steps; other tensors by their mean), "official" (linears of the
              blocks, q, k, v stacked, 300 steps; everything else stays the base's) or "closed_form" (as the first, at the
              minimum itself).

    steps:    of Adam; the variant's own when left out.
    rate:     its learning rate.
    exclude:  names, with * for any letters, of matrices that are averaged instead; embeddings of words when left out.
    """

    variant: Literal["fusion_bench", "official", "closed_form"] = "fusion_bench"
    steps: int | None = None
    rate: float = 1e-5
    exclude: tuple[str, ...] = VOCABULARY

    def __post_init__(self) -> None:
        known = isinstance(self.variant, str) and self.variant in WUDI_STEPS
        require(known, "merge.variant", self.variant, f"must be one of {', '.join(WUDI_STEPS)}")
        taken = self.variant != "closed_form" or self.steps is None
        require(taken, "merge.steps", self.steps, "must be left out: the closed form takes no steps")
        if self.steps is None:
            object.__setattr__(self, "steps", WUDI_STEPS[self.variant])
        whole_number("merge.steps", self.steps, least=0)
        number("merge.rate", self.rate)
        require(self.rate > 0, "merge.rate", self.rate, "must be above 0")
        fine = isinstance(self.exclude, list | tuple) and all(isinstance(pattern, str) for pattern in self.exclude)
        require(fine, "merge.exclude", self.exclude, "must be a list of names of tensors, with * for any letters")
        object.__setattr__(self, "exclude", tuple(self.exclude))  # YAML gives a list


@dataclass(frozen=True)
class RegMean:
    """off_diagonal: what the Gram matrices are multiplied by off their diagonal; 0.95 for CLIP (0.6 for GPT-2)."""

    off_diagonal: float = 0.95

    def __post_init__(self) -> None:
        number("merge.off_diagonal", self.off_diagonal)
        require(0 <= self.off_diagonal <= 1, "merge.off_diagonal", self.off_diagonal, "must lie in [0, 1]")


@dataclass(frozen=True)
class RegMeanPlusPlus(RegMean):
    """As RegMean."""


@dataclass(frozen=True)
class Lot:
    """The formula leaves nothing to set."""


@dataclass(frozen=True)
class AdaMerging:
    """granularity: one coefficient per expert and tensor ("layer") or per expert ("task").

    steps, rate:      of Adam; 1,000 and 0.001 are the paper's.
    start:            every coefficient before the first step.
    clamp:            keep coefficients in [0, 1] (the official code; FusionBench, which the paper used, does not).
    batches_per_step: of each task, their losses added; the official code takes two.
    """

    granularity: Literal["layer", "task"] = "layer"
    steps: int = 1000
    rate: float = 1e-3
    start: float = 0.3
    clamp: bool = False
    batches_per_step: int = 1

    def __post_init__(self) -> None:
        fine = self.granularity in ("layer", "task")
        require(fine, "merge.granularity", self.granularity, "must be layer or task")
        whole_number("merge.steps", self.steps, least=0)
        whole_number("merge.batches_per_step", self.batches_per_step)
        for key in ("rate", "start"):
            number(f"merge.{key}", getattr(self, key))
        require(self.rate > 0, "merge.rate", self.rate, "must be above 0")
        require(isinstance(self.clamp, bool), "merge.clamp", self.clamp, "must be true or false")


SETTINGS: dict[str, type[Any]] = {
    "average": Average,
    "task_arithmetic": TaskArithmetic,
    "ties": Ties,
    "wudi": Wudi,
    "regmean": RegMean,
    "regmean_plus_plus": RegMeanPlusPlus,
    "lot": Lot,
    "adamerging": AdaMerging,
}


class MergeSettings(TypedDict, total=False):
    """What methods can be told, for signatures: every setting of the classes above; a method refuses those of others."""

    scale: float
    density: float
    combine: Literal["sum", "mean"]
    variant: Literal["fusion_bench", "official", "closed_form"]
    steps: int | None
    rate: float
    exclude: tuple[str, ...] | list[str]
    off_diagonal: float
    granularity: Literal["layer", "task"]
    start: float
    clamp: bool
    batches_per_step: int


def settings_of(method: object, given: Mapping[str, Any], place: str) -> Any:
    """The settings of a method. Raises: UnknownKey for another method or a key it does not take; BadSetting for a value."""
    if method not in SETTINGS:
        raise UnknownKey(f"{place}.method", str(method), list(SETTINGS))
    return from_mapping(SETTINGS[str(method)], given, place)
