"""What each merging method can be told, with its source's values as defaults; what a value may be stands in its annotation.

Knows nothing of torch, so that params.yaml is checked before anything heavy is loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, TypedDict

from featcal.errors import UnknownKey
from featcal.settings import Checked, Count, Natural, Positive, Share, Within, from_mapping, require

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
class NoSettings(MethodSettings):
    """Of simple averaging and of LOT: their formulas leave nothing to set."""


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
    """off_diagonal: what the Gram matrices are multiplied by off their diagonal; 0.95 for CLIP (0.6 for GPT-2).

    Of RegMean++ too.
    """

    off_diagonal: Share = 0.95


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


@dataclass(frozen=True)
class WudiClosedForm(MethodSettings):
    """exclude: as of Wudi, whose variant "closed_form" this is."""

    exclude: tuple[str, ...] = VOCABULARY


@dataclass(frozen=True)
class TsvMerge(MethodSettings):
    """scale: of the merged task vector; 1 in FusionBench, chosen on validation data by the authors. Of Iso-C their authors try
           scales up to 3, and FusionBench prints results of 1.5.

    exclude: names, with * for any letters, of matrices that are averaged instead; embeddings of words when left out.
    """

    scale: float = 1.0
    exclude: tuple[str, ...] = VOCABULARY


@dataclass(frozen=True)
class IsoCts(TsvMerge):
    """common: share of the directions that the experts have in common; scale, exclude: as of Iso-C."""

    common: Share = 0.8


@dataclass(frozen=True)
class Dropping(MethodSettings):
    """drop: probability with which an entry of a task vector is dropped.   seed: of what is dropped."""

    drop: Share = 0.5
    seed: Natural = 42

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.drop < 1, "merge.drop", self.drop, "must be below 1: something has to be kept")


@dataclass(frozen=True)
class Dare(Dropping):
    """scale: of the sum of task vectors."""

    scale: float = 0.3


@dataclass(frozen=True)
class DareTies(Dropping, Ties):
    """density, scale, combine: of the TIES behind it."""

    scale: float = 0.5


@dataclass(frozen=True)
class Breadcrumbs(MethodSettings):
    """keep, remove: shares of a row's entries, by magnitude: how many are kept, below the largest, which are removed.

    scale: of the sum of task vectors. All three are what the authors' search tries first.
    """

    keep: Share = 0.15
    remove: Share = 0.006
    scale: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.keep + self.remove <= 1, "merge.keep", self.keep, "must leave room for what is removed")


@dataclass(frozen=True)
class Consensus(MethodSettings):
    """threshold: λ of the masks; FusionBench's 0.6, the authors choose it per task from 0.2 to 0.6 on validation data.

    tasks: k, to how many tasks an entry must matter.   scale: of the masked sum of task vectors.
    """

    threshold: Positive = 0.6
    tasks: Natural = 2
    scale: float = 0.3


@dataclass(frozen=True)
class Pcb(MethodSettings):
    """ratio: share of each expert's entries that compete, the highest balanced ones.

    scale: of the merged task vector. Both are the authors' for CLIP.
    """

    ratio: Share = 0.05
    scale: float = 1.2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.ratio > 0, "merge.ratio", self.ratio, "must be above 0: something has to compete")


@dataclass(frozen=True)
class Mats(MethodSettings):
    """steps: of conjugate gradients.   scale: of the task arithmetic they start from.

    off_diagonal: as of RegMean; 1 leaves the Gram matrices as they are.
    """

    steps: Natural = 100
    scale: float = 0.3
    off_diagonal: Share = 1.0


@dataclass(frozen=True)
class Fisher(MethodSettings):
    """normalize: the diagonals of all experts have the same length.

    floor: added to every entry of them.   seed: of the labels that are drawn.
    """

    normalize: bool = True
    floor: Positive = 1e-6
    seed: Natural = 42


@dataclass(frozen=True)
class GradientMatching(MethodSettings):
    """scale: α of every task vector.   base_weight: how much the base's curvature counts; a large one is task arithmetic.

    floor: δ, added to every entry.   seed: of the labels that are drawn. All but the seed are the authors'.
    """

    scale: float = 1.0
    base_weight: Annotated[float, Within(0)] = 1.0
    floor: Positive = 1e-12
    seed: Natural = 42


SETTINGS: dict[str, type[Any]] = {
    "average": NoSettings,
    "task_arithmetic": TaskArithmetic,
    "ties": Ties,
    "wudi": Wudi,
    "regmean": RegMean,
    "regmean_plus_plus": RegMean,
    "lot": NoSettings,
    "adamerging": AdaMerging,
    "wudi_closed_form": WudiClosedForm,
    "tsv_merge": TsvMerge,
    "iso_c": TsvMerge,
    "iso_cts": IsoCts,
    "dare": Dare,
    "dare_ties": DareTies,
    "breadcrumbs": Breadcrumbs,
    "consensus": Consensus,
    "pcb": Pcb,
    "mats": Mats,
    "fisher": Fisher,
    "gradient_matching": GradientMatching,
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
    common: float
    drop: float
    seed: int
    keep: float
    remove: float
    threshold: float
    tasks: int
    ratio: float
    normalize: bool
    floor: float
    base_weight: float


def settings_of(method: object, given: Mapping[str, Any], place: str) -> Any:
    """The settings of a method. Raises: UnknownKey for another method or a key it does not take; BadSetting for a value."""
    if method not in SETTINGS:
        raise UnknownKey(f"{place}.method", str(method), list(SETTINGS))
    return from_mapping(SETTINGS[str(method)], given, place)
