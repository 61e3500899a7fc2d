"""Settings of the adapter methods, checked when they are made; what the published versions chose, by name.

Knows nothing of torch, models or files.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from featcal.settings import number, require, whole_number


@dataclass(frozen=True)
class Training:
    """How adapters are trained, whichever method it is: Adam with betas 0.9 and 0.999, no weight decay, one step per batch.

    steps:      optimiser steps of every task.
    lr, batch:  learning rate; samples per step (pictures or texts).
    features:   "unit" divides both sides by their norm before the adapter, "raw" leaves them.
    reshuffle:  batches taken from one shuffle of a task's samples before the next; None: until all have been seen.
    encode:     "once" keeps the features of both frozen models, "each_step" computes them for every batch, as published.
    """

    name: ClassVar[str] = ""
    steps: int = 1000
    lr: float = 1e-3
    batch: int = 16
    features: Literal["unit", "raw"] = "raw"
    reshuffle: int | None = None
    encode: Literal["once", "each_step"] = "once"

    def __post_init__(self) -> None:
        whole_number(f"{self.name}.steps", self.steps)
        whole_number(f"{self.name}.batch", self.batch)
        number(f"{self.name}.lr", self.lr)
        require(self.lr > 0, f"{self.name}.lr", self.lr, "must be > 0 (paper: 1.0e-3)")
        require(self.features in ("unit", "raw"), f"{self.name}.features", self.features, "must be unit or raw")
        require(self.encode in ("once", "each_step"), f"{self.name}.encode", self.encode, "must be once or each_step")
        if self.reshuffle is not None:
            whole_number(f"{self.name}.reshuffle", self.reshuffle)


@dataclass(frozen=True)
class Surgery(Training):
    """Representation Surgery.   rank: r, the width of the adapter; the paper takes 16 where features have 512 or 768."""

    name: ClassVar[str] = "surgery"
    features: Literal["unit", "raw"] = "unit"
    rank: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("surgery.rank", self.rank)


@dataclass(frozen=True)
class ProbSurgery(Training):
    """ProbSurgery.

    hidden:     width of the hidden layer.
    kl_weight:  how much the divergence of the correction from a standard normal counts beside the loss.
    loss:       distance of the corrected feature to the expert's, a mean over its entries.
    """

    name: ClassVar[str] = "prob_surgery"
    hidden: int = 128
    kl_weight: float = 1e-4
    loss: Literal["l1", "mse", "smooth_l1"] = "l1"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("prob_surgery.hidden", self.hidden)
        number("prob_surgery.kl_weight", self.kl_weight)
        require(self.kl_weight >= 0, "prob_surgery.kl_weight", self.kl_weight, "must be >= 0 (official: 1.0e-4)")
        require(self.loss in ("l1", "mse", "smooth_l1"), "prob_surgery.loss", self.loss, "must be l1, mse or smooth_l1")


@dataclass(frozen=True)
class MeanShift:
    """One constant vector per task, which nothing is trained for.

    features:   "unit" divides both sides by their norm before the shift, "raw" leaves them.
    """

    name: ClassVar[str] = "mean_shift"
    steps: ClassVar[int] = 0
    encode: ClassVar[str] = "once"
    features: Literal["unit", "raw"] = "raw"

    def __post_init__(self) -> None:
        require(self.features in ("unit", "raw"), "mean_shift.features", self.features, "must be unit or raw")


AdapterMethod = Training | MeanShift

# "paper" is what FeatCal's comparison states (1,000 steps of 16 samples at 1e-3, in FusionBench's interface); what it leaves open
# is taken from the named repositories. ProbSurgery's noise has σ = 1 at the start and would bury features of unit length, so
# there the official raw features are taken.
SURGERY = {
    "paper": Surgery(),
    "fusion_bench": Surgery(),
    "official": Surgery(features="raw", reshuffle=2),  # 500 rounds, each with a new shuffle and two batches
}
PROB_SURGERY = {
    "paper": ProbSurgery(),
    "official": ProbSurgery(
        steps=5000, reshuffle=100
    ),  # 50 rounds of 100 batches; its choice of the best round on test is not made
}
