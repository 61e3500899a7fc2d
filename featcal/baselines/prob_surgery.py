"""The public function `prob_surgery`: ProbSurgery after merging."""

from collections.abc import Callable, Mapping
from typing import Literal

import torch

from featcal.baselines.adapters import Adapters
from featcal.baselines.settings import ProbSurgery
from featcal.baselines.training import adapters_for
from featcal.models.batch import Batches, Model
from featcal.models.features import Head

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
    feature + kl_weight · KL(N(μ, σ²) ‖ N(0, 1)). At test time z = μ.

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
    settings = ProbSurgery(
        steps=steps,
        lr=lr,
        batch=batch,
        features=features,
        reshuffle=reshuffle,
        encode=encode,
        hidden=hidden,
        kl_weight=kl_weight,
        loss=loss,
    )
    return adapters_for(settings, merged, experts, batches, head, seed, device, progress)
