"""Drift of a model's features from its expert's, h − h_exp of Eq. 2: relative, distance, cosine.

Sums over rows, so batches add.
"""

from dataclasses import dataclass
from math import nan, sqrt

import torch
from torch import Tensor

from featcal.core.precision import SUM_DTYPE


@dataclass
class Drift:
    """Sums over rows of a model's features and of its expert's features for the same inputs."""

    difference: float = 0.0  # Σ w ‖h − h_exp‖²
    reference: float = 0.0  # Σ w ‖h_exp‖²
    distance: float = 0.0  # Σ w ‖h − h_exp‖
    cosines: float = 0.0  # Σ w cos(h, h_exp)
    count: float = 0.0  # Σ w

    def add(self, h: Tensor, h_exp: Tensor, w: Tensor | None = None) -> None:
        """Add rows h, h_exp (..., d) with weights w (...), or 1 each; sums are float64."""
        norm = torch.linalg.vector_norm
        distance, length = norm(h - h_exp, dim=-1), norm(h_exp, dim=-1)  # (...), (...)
        lengths = (norm(h, dim=-1) * length).clamp_min(torch.finfo(h.dtype).tiny)
        cosine, one = (h * h_exp).sum(-1) / lengths, torch.ones_like(length)
        rows = torch.stack([distance**2, length**2, distance, cosine, one]).to(
            SUM_DTYPE
        )  # (5, ...)
        sums = (rows if w is None else rows * w.to(SUM_DTYPE)).flatten(1).sum(1).tolist()
        self.difference += sums[0]
        self.reference += sums[1]
        self.distance += sums[2]
        self.cosines += sums[3]
        self.count += sums[4]

    @property
    def relative(self) -> float:
        """Return ‖H − H_exp‖_F / ‖H_exp‖_F, or nan without features."""
        return sqrt(self.difference / self.reference) if self.reference else nan

    @property
    def l2(self) -> float:
        """Return the mean of ‖h − h_exp‖₂ over rows, or nan without rows."""
        return self.distance / self.count if self.count else nan

    @property
    def cosine(self) -> float:
        """Return the mean of cos(h, h_exp) over rows, or nan without rows."""
        return self.cosines / self.count if self.count else nan
