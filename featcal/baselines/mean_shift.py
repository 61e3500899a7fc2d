"""The public function `mean_shift`: one constant vector per task after merging."""

from collections.abc import Mapping
from typing import Literal

import torch

from featcal.baselines.adapters import Adapters
from featcal.baselines.settings import MeanShift
from featcal.baselines.training import adapters_for
from featcal.models.batch import Batches, Model
from featcal.models.features import Head

DEFAULT = MeanShift()


def mean_shift(
    merged: Model,
    experts: Mapping[str, Model],
    batches: Mapping[str, Batches],
    *,
    head: Head = None,
    features: Literal["unit", "raw"] = DEFAULT.features,
    device: str | torch.device | None = None,
) -> Adapters:
    """Add one constant vector per task to the merged model's last feature, without any training.

    f' = f + s_t with s_t = (1/n) Σ_i (f_t(x_i) − f(x_i)) over the n rows of task t; f (d,) is the
    merged model's feature and f_t the expert's. The mean of f' over these rows equals the expert's.

    Args:
        merged, experts, batches, head, device: as for `surgery`.
        features: "raw" leaves features as they are; "unit" divides them by their norm first.

    Returns: Adapters, as `surgery`, without losses.
    Raises: BadSetting, UnknownKey; BadBatches.
    Source: none; a control for the adapters. Like them it needs the task's identity at test time.
    """
    settings = MeanShift(features=features)
    return adapters_for(settings, merged, experts, batches, head, 0, device, None)
