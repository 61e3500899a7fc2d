"""The public function `prob_surgery`: ProbSurgery behind a merged model."""

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch

from featcal.baselines.adapters import Adapters
from featcal.baselines.features import Head
from featcal.baselines.settings import ProbSurgery
from featcal.baselines.training import adapters_for
from featcal.models.batch import Batch, Model

DEFAULT = ProbSurgery()


def prob_surgery(
    merged: Model,
    experts: Mapping[str, Model],
    batches: Mapping[str, Iterable[Batch]],
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
    """Train per task a Gaussian correction z of the merged model's last feature, f' = f − z; at
    test time z is its mean.

    Args:
        merged, experts, batches, head, seed, device, progress: as of `surgery`.
        hidden, kl_weight: width of the hidden layer; weight of the divergence from a standard
        normal. The official values.
        steps: the paper's; the official repository takes 5,000.
        lr, batch, reshuffle, encode, loss: as of rivals.settings.ProbSurgery; PROB_SURGERY there
        names the published versions.
        features: "raw" or "unit"; noise of σ = 1 would bury those of unit length.

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
