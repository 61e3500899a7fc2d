"""How an expert is trained, as settings; without torch, so that reading a suite costs nothing."""

import math
from dataclasses import dataclass
from typing import Annotated

from featcal.settings import Checked, Count, Positive, Within


@dataclass(frozen=True)
class FineTune(Checked):
    """SGD with Nesterov momentum, linear warm-up, cosine to zero. `frozen`: beginnings of the
    parameter names that stay.
    """

    place = "fine_tune"
    steps: Count = 100
    lr: Positive = 0.03
    batch: Count = 48
    warm_up: Count = 10
    momentum: Annotated[float, Within(0, 1, strictly=True)] = 0.9
    clip: Positive = 1.0
    frozen: tuple[str, ...] = ("embeddings", "pre_layrnorm")

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        return (
            self.lr
            * min(1.0, (step + 1) / self.warm_up)
            * 0.5
            * (1 + math.cos(math.pi * step / self.steps))
        )
