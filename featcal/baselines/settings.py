"""Settings and formulas of Surgery, ProbSurgery and mean shift.

T tasks · n rows (images or tokens) · d width of a feature · r rank · H hidden width. Weights are
given by name, for one task or stacked for all tasks, (T, …): the formulas are the same. Importing
this file does not load torch.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from featcal.settings import Settings, require

if TYPE_CHECKING:
    from torch import Tensor

Weights = Mapping[str, "Tensor"]


class Training(Settings):
    """How adapters are trained: Adam with betas 0.9 and 0.999, no weight decay, one step per batch.

    steps:      optimiser steps of every task.
    lr, batch:  learning rate; samples per step (images or texts).
    features:   "unit" divides both models' features by their norm first, "raw" leaves them.
    reshuffle:  batches taken from one shuffle of a task's samples before the next. Default: all.
    encode:     "once" keeps the features of both frozen models; "each_step" computes them for every
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
    """Representation Surgery: f' = f − U relu(D f).

    The defaults are those of FeatCal's paper and FusionBench. The official repository takes
    features="raw" and reshuffle=2: 500 rounds, each a new shuffle and two batches.

    rank: r, the width of the adapter; the paper takes 16 where features have 512 or 768.
    Source: Yang et al., Representation Surgery for Multi-Task Model Merging (ICML 2024).
    """

    name: ClassVar[str] = "surgery"
    title: ClassVar[str] = "Representation Surgery"
    noisy: ClassVar[bool] = False
    section = name
    features: Literal["unit", "raw"] = "unit"
    rank: PositiveInt = 16

    def shapes(self, width: int) -> dict[str, tuple[int, int]]:
        """Return each weight's shape; the first one is initialised at random, the others at zero.

        Raises: BadSetting for a rank above the width.
        """
        limit = f"must be at most {width}, the width of the features"
        require(self.rank <= width, "surgery.rank", self.rank, limit)
        return {"down": (self.rank, width), "up": (width, self.rank)}

    def correction(self, weights: Weights, features: "Tensor") -> "Tensor":
        """Return U relu(D f), which is subtracted from the features (…, n, d)."""
        return (features @ weights["down"].mT).relu() @ weights["up"].mT  # (…, n, r) -> (…, n, d)

    def row_losses(
        self, weights: Weights, merged: "Tensor", expert: "Tensor", noise: "Tensor | None"
    ) -> "Tensor":
        """Return the mean absolute difference |f' − f_t| of every row, (T, n)."""
        corrected = merged - self.correction(weights, merged)
        return (corrected - expert).abs().mean(-1)


class ProbSurgery(Training):
    """ProbSurgery: f' = f − z, z ~ N(μ, σ²), h = relu(A f), μ = M h, log σ² = V h. At test time
    z = μ.

    The noise has σ = 1 at the start and would bury features of unit length, so "raw" is the
    default. The official repository takes steps=5000 and reshuffle=100, and keeps the best of its
    50 rounds on test samples, which is not done here.

    hidden:     H, the width of the hidden layer.
    kl_weight:  weight of KL(N(μ, σ²) ‖ N(0, 1)), summed over d and averaged over rows.
    loss:       distance of the corrected feature to the expert's, averaged over its entries.
    Source: Wei et al., Representation Surgery in Model Merging with Probabilistic Modeling (ICML
    2025).
    """

    name: ClassVar[str] = "prob_surgery"
    title: ClassVar[str] = "ProbSurgery"
    noisy: ClassVar[bool] = True
    section = name
    hidden: PositiveInt = 128
    kl_weight: NonNegativeFloat = 1e-4
    loss: Literal["l1", "mse", "smooth_l1"] = "l1"

    def shapes(self, width: int) -> dict[str, tuple[int, int]]:
        """Return each weight's shape; the first is initialised at random, the others at zero."""
        up = (width, self.hidden)
        return {"hidden": (self.hidden, width), "mean": up, "log_variance": up}

    def correction(self, weights: Weights, features: "Tensor") -> "Tensor":
        """Return μ, which is subtracted from the features (…, n, d)."""
        return (features @ weights["hidden"].mT).relu() @ weights["mean"].mT

    def row_losses(
        self, weights: Weights, merged: "Tensor", expert: "Tensor", noise: "Tensor | None"
    ) -> "Tensor":
        """Return the loss of every row, (T, n); noise: ε of z = μ + σ ε, (T, n, d), zero where
        rows are padding.
        """
        from torch.nn import functional

        assert noise is not None
        distance = getattr(functional, f"{self.loss}_loss")
        h = (merged @ weights["hidden"].mT).relu()  # (T, n, H)
        mu, log_variance = h @ weights["mean"].mT, h @ weights["log_variance"].mT  # (T, n, d)
        corrected = merged - mu - (0.5 * log_variance).exp() * noise
        kl = -0.5 * (1 + log_variance - mu**2 - log_variance.exp()).sum(-1)  # (T, n)
        distances: Tensor = distance(corrected, expert, reduction="none").mean(-1)
        return distances + self.kl_weight * kl


class MeanShift(Settings):
    """Mean shift: f' = f + s, one constant vector s per task, without any training.

    features: "unit" divides both models' features by their norm first, "raw" leaves them.
    """

    name: ClassVar[str] = "mean_shift"
    title: ClassVar[str] = "Mean shift"
    section = name
    steps: ClassVar[int] = 0
    encode: ClassVar[str] = "once"
    features: Literal["unit", "raw"] = "raw"

    def shapes(self, width: int) -> dict[str, tuple[int, int]]:
        """Return each weight's shape."""
        return {"shift": (1, width)}

    def correction(self, weights: Weights, features: "Tensor") -> "Tensor":
        """Return −s (d,), which is subtracted from every row."""
        return -weights["shift"][0]


AdapterMethod = Surgery | ProbSurgery | MeanShift
METHODS: dict[str, type[AdapterMethod]] = {m.name: m for m in (Surgery, ProbSurgery, MeanShift)}
