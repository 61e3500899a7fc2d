"""What each merging method can be told, with its source's values as defaults; what a value may be stands in its annotation.

Knows nothing of torch, so that params.yaml is checked before anything heavy is loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypedDict

from featcal.errors import UnknownKey
from featcal.settings import Checked, Count, Natural, Positive, Share, from_mapping, require

# rows are words here, so models with other words in them differ in shape, and a row's direction says nothing of features
VOCABULARY = ("*shared.weight", "*embed_tokens.weight", "*token_embedding.weight", "*wte.weight", "*word_embeddings.weight",
              "*lm_head.weight", "*lm_head.bias")  # fmt: skip
WUDI_STEPS = {"fusion_bench": 400, "official": 300, "closed_form": 0}


def is_vocabulary(name: str, patterns: tuple[str, ...] = VOCABULARY) -> bool:
    """Whether a tensor has one row per word, told from its name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class MethodSettings(Checked):
    """Whatever a method is told."""

    place = "merge"


@dataclass(frozen=True)
class Average(MethodSettings):
    """θ = (1/N) Σ θᵢ: nothing to set."""


@dataclass(frozen=True)
class TaskArithmetic(MethodSettings):
    """scale: s of θ₀ + s Σ τᵢ; 0.3 for eight tasks."""

    scale: float = 0.3


@dataclass(frozen=True)
class Ties(MethodSettings):
    """density: share of each task vector that is kept, the largest by magnitude.

    scale:   of the merged task vector.
    combine: how what agrees with the elected sign is put together: "sum" (FusionBench, whose recipes the paper follows) or "mean"
             (the disjoint mean of the method's own paper, which takes scale=1).
    """

    density: Share = 0.2
    scale: float = 0.3
    combine: Literal["sum", "mean"] = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.density > 0, "merge.density", self.density, "must be above 0: something has to be kept")


@dataclass(frozen=True)
class Wudi(MethodSettings):
    """variant: "fusion_bench" (the paper's: every matrix, 400 steps; other tensors by their mean), "official" (linears of the
              blocks, q, k, v stacked, 300 steps; everything else stays the base's) or "closed_form" (as the first, at the
              minimum itself).

    steps:    of Adam; the variant's own when left out.
    rate:     its learning rate.
    exclude:  names, with * for any letters, of matrices that are averaged instead; embeddings of words when left out.
    """

    variant: Literal["fusion_bench", "official", "closed_form"] = "fusion_bench"
    steps: Natural | None = None
    rate: Positive = 1e-5
    exclude: tuple[str, ...] = VOCABULARY

    def __post_init__(self) -> None:
        super().__post_init__()
        taken = self.variant != "closed_form" or self.steps is None
        require(taken, "merge.steps", self.steps, "must be left out: the closed form takes no steps")
        if self.steps is None:
            object.__setattr__(self, "steps", WUDI_STEPS[self.variant])


@dataclass(frozen=True)
class RegMean(MethodSettings):
    """off_diagonal: what the Gram matrices are multiplied by off their diagonal; 0.95 for CLIP (0.6 for GPT-2)."""

    off_diagonal: Share = 0.95


@dataclass(frozen=True)
class RegMeanPlusPlus(RegMean):
    """As RegMean."""


@dataclass(frozen=True)
class Lot(MethodSettings):
    """The formula leaves nothing to set."""


@dataclass(frozen=True)
class AdaMerging(MethodSettings):
    """granularity: one coefficient per expert and tensor ("layer") or per expert ("task").

    steps, rate:      of Adam; 1,000 and 0.001 are the paper's.
    start:            every coefficient before the first step.
    clamp:            keep coefficients in [0, 1] (the official code; FusionBench, which the paper used, does not).
    batches_per_step: of each task, their losses added; the official code takes two.
    """

    granularity: Literal["layer", "task"] = "layer"
    steps: Natural = 1000
    rate: Positive = 1e-3
    start: float = 0.3
    clamp: bool = False
    batches_per_step: Count = 1


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
