"""ProbSurgery after merging: a Gaussian correction for each task."""

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor
from torch.nn import functional

from featcal.baselines.adapters import Adapters, Weights
from featcal.baselines.training import Training, adapters_for
from featcal.models.batch import Batches, Head, Model


class ProbSurgery(Training):
    """Settings and formula of `prob_surgery`. T tasks · n rows · d width of a feature.

    The official repository takes steps=5000 and reshuffle=100, and keeps the best of its 50 rounds
    on test samples, which is not done here.
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

    def correction(self, weights: Weights, features: Tensor) -> Tensor:
        """Return μ, which is subtracted from the features (…, n, d)."""
        return (features @ weights["hidden"].mT).relu() @ weights["mean"].mT

    def row_losses(
        self, weights: Weights, merged: Tensor, expert: Tensor, noise: Tensor | None
    ) -> Tensor:
        """Return the loss of every row, (T, n); noise: ε of z = μ + σ ε, (T, n, d), zero where
        rows are padding.
        """
        assert noise is not None
        distance = getattr(functional, f"{self.loss}_loss")
        h = (merged @ weights["hidden"].mT).relu()  # (T, n, H)
        mu, log_variance = h @ weights["mean"].mT, h @ weights["log_variance"].mT  # (T, n, d)
        corrected = merged - mu - (0.5 * log_variance).exp() * noise
        kl = -0.5 * (1 + log_variance - mu**2 - log_variance.exp()).sum(-1)  # (T, n)
        return distance(corrected, expert, reduction="none").mean(-1) + self.kl_weight * kl


DEFAULT = ProbSurgery()


def prob_surgery(
    merged: Model,
    experts: Mapping[str, Model],
    batches: Mapping[str, Batches],
    *,
    head: Head = None,
    hidden: int = DEFAULT.hidden,
    kl_weight: float = DEFAULT.kl_weight,
    steps: int = DEFAULT.steps,
    lr: float = DEFAULT.lr,
    batch: int = DEFAULT.batch,
    reshuffle: int | None = DEFAULT.reshuffle,
    encode: Literal["once", "each_step"] = DEFAULT.encode,
    features: Literal["unit", "raw"] = DEFAULT.features,
    loss: Literal["l1", "mse", "smooth_l1"] = DEFAULT.loss,
    seed: int = 42,
    device: str | torch.device | None = None,
    progress: Callable[[str], None] | None = None,
) -> Adapters:
    """Train ProbSurgery, a Gaussian correction, for each task of a merged model.

    f' = f − z with z ~ N(μ, σ²), h = relu(A f), μ = M h and log σ² = V h; f (d,) is the merged
    model's last feature, A (H, d), M and V (d, H). The loss is the distance of f' to the expert's
    feature + kl_weight · KL(N(μ, σ²) ‖ N(0, 1)), the divergence summed over d. At test time z = μ.

    Args:
        merged, experts, batches, head, lr, batch, reshuffle, encode, seed, device, progress: as for
            `surgery`.
        hidden: H, the width of the hidden layer; the official value.
        kl_weight: weight of the divergence; the official value.
        steps: optimiser steps per task; the paper's. The official repository takes 5,000.
        features: "raw" or "unit"; noise of σ = 1 would bury features of unit length.
        loss: distance to the expert's feature, averaged over its entries.

    Returns: Adapters, as `surgery`.
    Raises: as `surgery`.
    Source: Wei et al., Representation Surgery in Model Merging with Probabilistic Modeling (ICML
    2025).
    """
    given = locals()
    settings = ProbSurgery(**{name: given[name] for name in ProbSurgery.model_fields})
    return adapters_for(settings, merged, experts, batches, head, seed, device, progress)
