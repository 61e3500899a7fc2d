"""How far a model's features are from its expert's (the drift h − h_exp of Eq. 2): relative drift,
distance, cosine.

Sums over rows, so that batches add. Knows tensors only.
"""

from dataclasses import dataclass
from math import nan, sqrt

import torch
from torch import Tensor

from featcal.core.precision import SUM_DTYPE


@dataclass
class Drift:
    """Sums over rows of features of a model against the same rows of its expert."""

    difference: float = 0.0  # Σ ‖h − h_exp‖²
    reference: float = 0.0  # Σ ‖h_exp‖²
    distance: float = 0.0  # Σ ‖h − h_exp‖
    cosines: float = 0.0  # Σ cos(h, h_exp)
    count: float = 0.0  # rows, each with its weight

    def add(self, h: Tensor, h_exp: Tensor, w: Tensor | None = None) -> None:
        """Add rows: h, h_exp (..., d); w (...) weighs rows, None counts each once. Rows in data
        precision, sums in float64.
        """
        distance, length = (
            torch.linalg.vector_norm(h - h_exp, dim=-1),
            torch.linalg.vector_norm(h_exp, dim=-1),
        )  # (...), (...)
        lengths = (torch.linalg.vector_norm(h, dim=-1) * length).clamp_min(
            torch.finfo(h.dtype).tiny
        )
        rows = torch.stack(
            [
                distance**2,
                length**2,
                distance,
                (h * h_exp).sum(-1) / lengths,
                torch.ones_like(length),
            ]
        )
        rows = rows.to(SUM_DTYPE) if w is None else rows.to(SUM_DTYPE) * w.to(SUM_DTYPE)  # (5, ...)
        sums = rows.flatten(1).sum(1).tolist()
        self.difference += sums[0]
        self.reference += sums[1]
        self.distance += sums[2]
        self.cosines += sums[3]
        self.count += sums[4]

    @property
    def relative(self) -> float:
        """‖H − H_exp‖_F / ‖H_exp‖_F; nan without features."""
        return sqrt(self.difference / self.reference) if self.reference else nan

    @property
    def l2(self) -> float:
        """Mean over rows of ‖h − h_exp‖₂; nan without rows."""
        return self.distance / self.count if self.count else nan

    @property
    def cosine(self) -> float:
        """Mean over rows of cos(h, h_exp); nan without rows."""
        return self.cosines / self.count if self.count else nan
