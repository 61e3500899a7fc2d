"""How an expert is trained, as settings; without torch, so that reading a suite costs nothing."""

import math
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from featcal.settings import Settings


class FineTune(Settings):
    """SGD with Nesterov momentum, linear warm-up, cosine to zero. `frozen`: beginnings of the
    parameter names that stay.
    """

    section = "fine_tune"
    steps: PositiveInt = 100
    lr: PositiveFloat = 0.03
    batch: PositiveInt = 48
    warm_up: PositiveInt = 10
    momentum: Annotated[float, Field(gt=0, lt=1)] = 0.9
    clip: PositiveFloat = 1.0
    frozen: tuple[str, ...] = ("embeddings", "pre_layrnorm")

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        return (
            self.lr
            * min(1.0, (step + 1) / self.warm_up)
            * 0.5
            * (1 + math.cos(math.pi * step / self.steps))
        )
