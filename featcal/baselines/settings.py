"""Settings of the adapter methods, checked when they are made; what the published versions chose,
by name.

Knows nothing of torch, models or files.
"""

from typing import ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from featcal.settings import Settings


class Training(Settings):
    """How adapters are trained, whichever method it is: Adam with betas 0.9 and 0.999, no weight
    decay, one step per batch.

    steps:      optimiser steps of every task.
    lr, batch:  learning rate; samples per step (pictures or texts).
    features:   "unit" divides both sides by their norm before the adapter, "raw" leaves them.
    reshuffle:  batches taken from one shuffle of a task's samples before the next; None: until all
                have been seen.
    encode:     "once" keeps the features of both frozen models, "each_step" computes them for every
                batch, as published.
    """

    name: ClassVar[str] = ""
    steps: PositiveInt = 1000
    lr: PositiveFloat = 1e-3
    batch: PositiveInt = 16
    features: Literal["unit", "raw"] = "raw"
    reshuffle: PositiveInt | None = None
    encode: Literal["once", "each_step"] = "once"


class Surgery(Training):
    """Representation Surgery.   rank: r, the width of the adapter; the paper takes 16 where
    features have 512 or 768.
    """

    name: ClassVar[str] = "surgery"
    section = name
    features: Literal["unit", "raw"] = "unit"
    rank: PositiveInt = 16


class ProbSurgery(Training):
    """ProbSurgery.

    hidden:     width of the hidden layer.
    kl_weight:  how much the divergence of the correction from a standard normal counts beside the
                loss.
    loss:       distance of the corrected feature to the expert's, a mean over its entries.
    """

    name: ClassVar[str] = "prob_surgery"
    section = name
    hidden: PositiveInt = 128
    kl_weight: NonNegativeFloat = 1e-4
    loss: Literal["l1", "mse", "smooth_l1"] = "l1"


class MeanShift(Settings):
    """One constant vector per task, which nothing is trained for.

    features:   "unit" divides both sides by their norm before the shift, "raw" leaves them.
    """

    name: ClassVar[str] = "mean_shift"
    section = name
    steps: ClassVar[int] = 0
    encode: ClassVar[str] = "once"
    features: Literal["unit", "raw"] = "raw"


AdapterMethod = Surgery | ProbSurgery | MeanShift

# "paper" is what FeatCal's comparison states (1,000 steps of 16 samples at 1e-3, in FusionBench's
# interface); what it leaves open
# is taken from the named repositories. ProbSurgery's noise has σ = 1 at the start and would bury
# features of unit length, so
# there the official raw features are taken.
SURGERY = {
    "paper": Surgery(),
    "fusion_bench": Surgery(),
    "official": Surgery(
        features="raw", reshuffle=2
    ),  # 500 rounds, each with a new shuffle and two batches
}
PROB_SURGERY = {
    "paper": ProbSurgery(),
    "official": ProbSurgery(
        steps=5000, reshuffle=100
    ),  # 50 rounds of 100 batches; its choice of the best round on test is not made
}
