"""What merging methods that look at weights alone can be told, with their sources' values as
defaults.

What a value may be stands in its annotation. Knows nothing of torch: params.yaml is checked before
anything heavy is loaded.
"""

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat

from featcal.merging.vocabulary import VOCABULARY
from featcal.settings import Fraction, Settings, require

WUDI_STEPS = {"fusion_bench": 400, "official": 300, "closed_form": 0}


class MethodSettings(Settings):
    """Whatever a method is told."""

    place = "merge"


class NoSettings(MethodSettings):
    """Of simple averaging and of LOT: their formulas leave nothing to set."""


class TaskArithmetic(MethodSettings):
    """scale: s of θ₀ + s Σ τᵢ; 0.3 for eight tasks."""

    scale: float = 0.3


class Ties(MethodSettings):
    """density: share of each task vector that is kept, the largest by magnitude.

    scale:   of the merged task vector.
    combine: how what agrees with the elected sign is put together: "sum" (FusionBench, whose
    recipes the paper follows) or "mean"
             (the disjoint mean of the method's own paper, which takes scale=1).
    """

    density: Fraction = 0.2
    scale: float = 0.3
    combine: Literal["sum", "mean"] = "sum"

    def check(self) -> None:
        super().check()
        require(
            self.density > 0,
            "merge.density",
            self.density,
            "must be above 0: something has to be kept",
        )


class Wudi(MethodSettings):
    """variant: "fusion_bench" (the paper's: every matrix, 400 steps; other tensors by their mean),
    "official" (linears of the
              blocks, q, k, v stacked, 300 steps; everything else stays the base's) or "closed_form"
              (as the first, at the minimum itself).

    steps:    of Adam; the variant's own when left out.
    rate:     its learning rate.
    exclude:  names, with * for any letters, of matrices that are averaged instead; embeddings of
              words when left out.
    rtol:     of the closed form: eigenvalues below so much of the largest count as 0; d times
              float64's rounding when left out.
    """

    variant: Literal["fusion_bench", "official", "closed_form"] = "fusion_bench"
    steps: NonNegativeInt | None = None
    rate: PositiveFloat = 1e-5
    exclude: tuple[str, ...] = VOCABULARY
    rtol: PositiveFloat | None = None

    def check(self) -> None:
        super().check()
        taken = self.variant != "closed_form" or self.steps is None
        require(
            taken, "merge.steps", self.steps, "must be left out: the closed form takes no steps"
        )
        solved = self.variant == "closed_form" or self.rtol is None
        require(solved, "merge.rtol", self.rtol, "must be left out: it is of the closed form")
        if self.steps is None:
            object.__setattr__(self, "steps", WUDI_STEPS[self.variant])


class WudiClosedForm(MethodSettings):
    """exclude, rtol: as of Wudi, whose variant "closed_form" this is."""

    exclude: tuple[str, ...] = VOCABULARY
    rtol: PositiveFloat | None = None


class TsvMerge(MethodSettings):
    """scale: of the merged task vector; 1 in FusionBench, chosen on validation data by the authors.
    Of Iso-C their authors try
           scales up to 3, and FusionBench prints results of 1.5.

    exclude: names, with * for any letters, of matrices that are averaged instead; embeddings of
    words when left out.
    """

    scale: float = 1.0
    exclude: tuple[str, ...] = VOCABULARY


class IsoCts(TsvMerge):
    """common: share of the directions that the experts have in common; scale, exclude: as of
    Iso-C.
    """

    common: Fraction = 0.8


class Dropping(MethodSettings):
    """drop: probability with which an entry of a task vector is dropped.   seed: of what is
    dropped.
    """

    drop: Fraction = 0.5
    seed: NonNegativeInt = 42

    def check(self) -> None:
        super().check()
        require(self.drop < 1, "merge.drop", self.drop, "must be below 1: something has to be kept")


class Dare(Dropping):
    """scale: of the sum of task vectors."""

    scale: float = 0.3


class DareTies(Dropping, Ties):
    """density, scale, combine: of the TIES behind it."""

    scale: float = 0.5


class Breadcrumbs(MethodSettings):
    """keep, remove: shares of a row's entries, by magnitude: how many are kept, below the largest,
    which are removed.

    scale: of the sum of task vectors. All three are what the authors' search tries first.
    """

    keep: Fraction = 0.15
    remove: Fraction = 0.006
    scale: float = 0.2

    def check(self) -> None:
        super().check()
        require(
            self.keep + self.remove <= 1,
            "merge.keep",
            self.keep,
            "must leave room for what is removed",
        )


class Consensus(MethodSettings):
    """threshold: λ of the masks; FusionBench's 0.6, the authors choose it per task from 0.2 to 0.6
    on validation data.

    tasks: k, to how many tasks an entry must matter.   scale: of the masked sum of task vectors.
    """

    threshold: PositiveFloat = 0.6
    tasks: NonNegativeInt = 2
    scale: float = 0.3


class Pcb(MethodSettings):
    """ratio: share of each expert's entries that compete, the highest balanced ones.

    scale: of the merged task vector. Both are the authors' for CLIP.
    """

    ratio: Fraction = 0.05
    scale: float = 1.2

    def check(self) -> None:
        super().check()
        require(
            self.ratio > 0, "merge.ratio", self.ratio, "must be above 0: something has to compete"
        )
