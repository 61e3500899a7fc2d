"""Mean shift: one constant vector per task after merging, f' = f + s, without any training."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from featcal.baselines.adapters import Adapters, Baseline, Pair, Weights
from featcal.baselines.training import adapters_for
from featcal.errors import BadBatches
from featcal.models.batch import Batches, Head, Model


class MeanShift(Baseline):
    """Settings and formula of `mean_shift`."""

    name: ClassVar[str] = "mean_shift"
    title: ClassVar[str] = "Mean shift"
    section = name
    features: Literal["unit", "raw"] = "raw"

    def shapes(self, width: int) -> dict[str, tuple[int, int]]:
        """Return each weight's shape."""
        return {"shift": (1, width)}

    def correction(self, weights: Weights, features: Tensor) -> Tensor:
        """Return −s (d,), which is subtracted from every row."""
        return -weights["shift"][0]

    def fit(self, pairs: Mapping[str, Pair], seed: int = 42, *_: object) -> Adapters:
        """Return the mean of expert − merged features of each task, summed in float64.

        Raises: BadBatches for features that hold NaN or infinity.
        """
        shifts = {}
        for task, pair in pairs.items():
            expert, merged = (
                self.prepared(rows).mean(0, keepdim=True, dtype=torch.float64)
                for rows in (pair.expert, pair.merged)  # (n, d)
            )
            shift = (expert - merged).cpu()  # (1, d)
            if not torch.isfinite(shift).all():
                problem = "gives features that are not finite; look for NaN in samples and models"
                raise BadBatches(task, problem)
            exact = pair.merged.dtype == torch.float64
            shifts[task] = {"shift": shift if exact else shift.float()}
        return Adapters(self, seed, shifts)


def mean_shift(
    merged: Model,
    experts: Mapping[str, Model],
    batches: Mapping[str, Batches],
    *,
    head: Head = None,
    features: Literal["unit", "raw"] = "raw",
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
    return adapters_for(MeanShift(features=features), merged, experts, batches, head, 0, device)
