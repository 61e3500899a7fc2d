"""The public function `prob_surgery`: ProbSurgery behind a merged model."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from featcal.baselines.adapters import Adapters
from featcal.baselines.features import Batch, Head
from featcal.baselines.pool import Model, adapters_for
from featcal.baselines.settings import ProbSurgery
from featcal.settings import from_mapping


def prob_surgery(
    merged: Model,
    experts: Mapping[str, Model],
    batches: Mapping[str, Iterable[Batch]],
    *,
    head: Head = None,
    hidden: int = 128,
    kl_weight: float = 1e-4,
    steps: int = 1000,
    seed: int = 42,
    device: str | torch.device | None = None,
    progress: Callable[[str], None] | None = None,
    **details: Any,
) -> Adapters:
    """Train per task a Gaussian correction z of the merged model's last feature, f' = f − z; at test time z is its mean.

    Args:
        merged, experts, batches, head, seed, device, progress: as of `surgery`.
        hidden, kl_weight: width of the hidden layer; weight of the divergence from a standard normal. The official values.
        steps: the paper's; the official repository takes 5,000.
        details: other settings of baselines.settings.ProbSurgery (lr, batch, features, reshuffle, encode, loss); PROB_SURGERY
            there names the published versions. Features are raw by default: noise of σ = 1 would bury those of unit length.

    Returns: Adapters, as `surgery`.
    Raises: as `surgery`.
    Source: Wei et al., Representation Surgery in Model Merging with Probabilistic Modeling (ICML 2025).
    """
    chosen = {"hidden": hidden, "kl_weight": kl_weight, "steps": steps, **details}
    settings = from_mapping(ProbSurgery, chosen, "prob_surgery")
    return adapters_for(settings, merged, experts, batches, head, seed, device, progress)
