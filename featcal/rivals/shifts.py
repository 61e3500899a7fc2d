"""Constant corrections from features that have been computed.

n rows (pictures or tokens) · d width of a feature. Knows no models.
"""

import torch
from torch import Tensor

from featcal.errors import BadBatches
from featcal.rivals.adapters import unit
from featcal.rivals.features import Pair
from featcal.rivals.settings import MeanShift


def shift(settings: MeanShift, task: str, pair: Pair) -> Tensor:
    """The mean of (expert's feature − merged model's feature) of one task, summed in double
    precision.

    Returns: a row (1, d) on the CPU: double where the features are, else single.
    Raises: BadBatches for features that hold NaN or infinity.
    """
    means = []
    for rows in (pair.expert, pair.merged):  # (n, d)
        exact = rows if rows.dtype == torch.float64 else rows.float()
        means.append(
            (unit(exact) if settings.features == "unit" else exact).mean(
                0, keepdim=True, dtype=torch.float64
            )
        )
    moved = (means[0] - means[1]).cpu()
    if not torch.isfinite(moved).all():
        raise BadBatches(
            task,
            "gives features that are not finite; look for NaN in the samples and in both models",
        )
    return moved if pair.merged.dtype == torch.float64 else moved.float()
