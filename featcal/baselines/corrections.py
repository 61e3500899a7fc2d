"""The corrections of a feature: what is learnt, what it does to a feature, what its training
minimises.

T tasks · n rows (pictures or tokens) · d width of a feature · r rank · H hidden width.  Weights are
given by name, those of one
task or those of all tasks stacked in front: the products are the same. Knows no models and no
files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from featcal.baselines.settings import (
    AdapterMethod,
    MeanShift,
    ProbSurgery,
    Surgery,
    Training,
)
from featcal.settings import require

Weights = Mapping[str, Tensor]
_DISTANCES = {
    "l1": functional.l1_loss,
    "mse": functional.mse_loss,
    "smooth_l1": functional.smooth_l1_loss,
}


@dataclass(frozen=True)
class Stacked:
    """One batch of every task, behind each other; a task with fewer rows than the longest is filled
    up with zeros.

    Without biases nothing is learnt from a row of zeros: its hidden layer, its correction and its
    loss are zero.
    """

    merged: Tensor  # (T, n, d)
    expert: Tensor  # (T, n, d)
    counts: Tensor  # (T,) rows that are there

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the rows that are there of values (T, n) that are zero elsewhere, per task
        (T,).
        """
        return values.sum(1) / self.counts


class Correction(Protocol):
    """What application needs of a method."""

    @property
    def settings(self) -> AdapterMethod: ...
    def shapes(self, width: int) -> dict[str, tuple[int, int]]: ...
    def correction(self, weights: Weights, features: Tensor) -> Tensor: ...


class Trained(Correction, Protocol):
    """What training needs besides; of the shapes the first is drawn, the others start at zero."""

    @property
    def noisy(self) -> bool: ...
    def loss(self, weights: Weights, batch: Stacked, noise: Tensor | None) -> Tensor: ...


@dataclass(frozen=True)
class LowRank:
    """Surgery: f' = f − U relu(D f), trained with the mean absolute difference to the expert's
    feature.

    Source: Yang et al., Representation Surgery for Multi-Task Model Merging (ICML 2024).
    """

    settings: Surgery
    noisy = False

    def shapes(self, width: int) -> dict[str, tuple[int, int]]:
        """Raises: BadSetting for a rank above the width."""
        rank = self.settings.rank
        require(
            rank <= width,
            "surgery.rank",
            rank,
            f"must be at most {width}, the width of the features",
        )
        return {"down": (rank, width), "up": (width, rank)}

    def correction(self, weights: Weights, features: Tensor) -> Tensor:
        """What is taken off features (…, n, d)."""
        return (
            torch.relu(features @ weights["down"].mT) @ weights["up"].mT
        )  # (…, n, r) -> (…, n, d)

    def loss(self, weights: Weights, batch: Stacked, noise: Tensor | None) -> Tensor:
        """Loss of every task, (T,)."""
        corrected = batch.merged - self.correction(weights, batch.merged)
        return batch.mean((corrected - batch.expert).abs().mean(-1))


@dataclass(frozen=True)
class Gaussian:
    """ProbSurgery: f' = f − z, z ~ N(μ, σ²) with h = relu(A f), μ = M h, log σ² = V h; at test time
    f' = f − μ.

    Trained with the distance to the expert's feature + kl_weight · KL(N(μ, σ²) ‖ N(0, 1)), summed
    over d and averaged over rows.
    Source: Wei et al., Representation Surgery in Model Merging with Probabilistic Modeling (ICML
    2025).
    """

    settings: ProbSurgery
    noisy = True

    def shapes(self, width: int) -> dict[str, tuple[int, int]]:
        hidden = self.settings.hidden
        return {"hidden": (hidden, width), "mean": (width, hidden), "log_variance": (width, hidden)}

    def correction(self, weights: Weights, features: Tensor) -> Tensor:
        """The mean of what is taken off features (…, n, d)."""
        return self._hidden(weights, features) @ weights["mean"].mT

    def loss(self, weights: Weights, batch: Stacked, noise: Tensor | None) -> Tensor:
        """Loss of every task, (T,).   noise: ε of z = μ + σ ε, (T, n, d), zero where rows are
        filled up.
        """
        h = self._hidden(weights, batch.merged)
        mu, log_variance = h @ weights["mean"].mT, h @ weights["log_variance"].mT  # (T, n, d)
        corrected = batch.merged - mu - torch.exp(0.5 * log_variance) * noise
        distance = _DISTANCES[self.settings.loss](corrected, batch.expert, reduction="none").mean(
            -1
        )
        divergence = -0.5 * (1 + log_variance - mu**2 - log_variance.exp()).sum(-1)  # (T, n)
        return batch.mean(distance + self.settings.kl_weight * divergence)

    def _hidden(self, weights: Weights, features: Tensor) -> Tensor:
        return torch.relu(features @ weights["hidden"].mT)


@dataclass(frozen=True)
class Constant:
    """Mean shift: f' = f + s, the same vector s for every feature of a task."""

    settings: MeanShift

    def shapes(self, width: int) -> dict[str, tuple[int, int]]:
        return {"shift": (1, width)}

    def correction(self, weights: Weights, features: Tensor) -> Tensor:
        """What is taken off every row of features (…, d): the same for all, (d,)."""
        return -weights["shift"][0]


def correction_of(settings: AdapterMethod) -> Correction:
    """The method that these are the settings of."""
    return Constant(settings) if isinstance(settings, MeanShift) else trained_correction(settings)


def trained_correction(settings: Training) -> Trained:
    """The same of a method that is trained."""
    if isinstance(settings, ProbSurgery):
        return Gaussian(settings)
    assert isinstance(settings, Surgery)
    return LowRank(settings)
