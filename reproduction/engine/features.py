"""Features of encoders, which studies compare with the experts'."""

from typing import Any

import torch
from torch import Tensor, nn

from featcal.evaluation.accuracy import projected_features, require_finite


def projected(
    model: nn.Module, projection: Tensor | None, samples: Any, size: int, location: str
) -> Tensor:
    """Return features (n, p) as they leave the projection, on the CPU. Raises: NotFinite."""
    batches = samples.batches(None, size)
    features = torch.cat([projected_features(model, projection, batch).cpu() for batch in batches])
    require_finite(features, location)
    return features
