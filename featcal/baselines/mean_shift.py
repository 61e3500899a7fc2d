"""The public function `mean_shift`: a constant vector per task behind a merged model."""

from collections.abc import Iterable, Mapping
from typing import Literal

import torch

from featcal.baselines.adapters import Adapters
from featcal.baselines.features import Head
from featcal.baselines.settings import MeanShift
from featcal.baselines.training import adapters_for
from featcal.models.batch import Batch, Model

DEFAULT = MeanShift()


def mean_shift(
    merged: Model,
    experts: Mapping[str, Model],
    batches: Mapping[str, Iterable[Batch]],
    *,
    head: Head = None,
    features: Literal["unit", "raw"] = DEFAULT.features,
    device: str | torch.device | None = None,
) -> Adapters:
    """Add per task one constant vector to the merged model's last feature, f' = f + s_t, without
    any training.

    s_t = (1/n) Σ_i (f_t(x_i) − f(x_i)) over the n samples of task t: f is the merged model's
    feature and f_t the expert's, (d,). Then the mean of f' over these samples is the expert's: what
    an adapter does beyond it, it does to single samples.

    Args:
        merged, experts, batches, head, device: as of `surgery`.
        features: "raw" as the models give them; "unit" divides both by their norm first.

    Returns: Adapters, as `surgery`; without losses.
    Raises: BadSetting, UnknownKey; BadBatches.
    Source: none; a control for the adapters. It needs the task's identity at test time, as they do.
    """
    return adapters_for(
        MeanShift(features=features), merged, experts, batches, head, 0, device, None
    )
