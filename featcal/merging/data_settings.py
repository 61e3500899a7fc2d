"""What merging methods that look at samples can be told, with their sources' values as defaults.
Knows nothing of torch.
"""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from featcal.merging.method_settings import MethodSettings
from featcal.settings import Fraction


class RegMean(MethodSettings):
    """off_diagonal: what the Gram matrices are multiplied by off their diagonal; 0.95 for CLIP (0.6
    for GPT-2).

    Of RegMean++ too.
    """

    off_diagonal: Fraction = 0.95


class AdaMerging(MethodSettings):
    """granularity: one coefficient per expert and tensor ("layer") or per expert ("task").

    steps, rate:      of Adam; 1,000 and 0.001 are the paper's.
    start:            every coefficient before the first step.
    clamp:            keep coefficients in [0, 1] (the official code; FusionBench, which the paper
                      used, does not).
    batches_per_step: of each task, their losses added; the official code takes two.
    """

    granularity: Literal["layer", "task"] = "layer"
    steps: NonNegativeInt = 1000
    rate: PositiveFloat = 1e-3
    start: float = 0.3
    clamp: bool = False
    batches_per_step: PositiveInt = 1


class Mats(MethodSettings):
    """steps: of conjugate gradients.   scale: of the task arithmetic they start from.

    off_diagonal: as of RegMean; 1 leaves the Gram matrices as they are.
    """

    steps: NonNegativeInt = 100
    scale: float = 0.3
    off_diagonal: Fraction = 1.0


class Fisher(MethodSettings):
    """normalize: the diagonals of all experts have the same length.

    floor: added to every entry of them.   seed: of the labels that are drawn.
    """

    normalize: bool = True
    floor: PositiveFloat = 1e-6
    seed: NonNegativeInt = 42


class GradientMatching(MethodSettings):
    """scale: α of every task vector.   base_weight: how much the base's curvature counts; a large
    one is task arithmetic.

    floor: δ, added to every entry.   seed: of the labels that are drawn. All but the seed are the
    authors'.
    """

    scale: float = 1.0
    base_weight: NonNegativeFloat = 1.0
    floor: PositiveFloat = 1e-12
    seed: NonNegativeInt = 42
