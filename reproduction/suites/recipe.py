"""How an expert is trained, as settings; without torch, so that reading a suite costs nothing."""

import math
from dataclasses import dataclass

from featcal.settings import require


@dataclass(frozen=True)
class FineTune:
    """SGD with Nesterov momentum, linear warm-up, cosine to zero. `frozen`: beginnings of the parameter names that stay."""

    steps: int = 100
    lr: float = 0.03
    batch: int = 48
    warm_up: int = 10
    momentum: float = 0.9
    clip: float = 1.0
    frozen: tuple[str, ...] = ("embeddings", "pre_layrnorm")

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "warm_up"):
            value = getattr(self, name)
            require(isinstance(value, int) and value > 0, f"fine_tune.{name}", value, "must be a whole number above 0")
        for name in ("lr", "clip"):
            value = getattr(self, name)
            require(isinstance(value, int | float) and value > 0, f"fine_tune.{name}", value, "must be a number above 0")
        require(0 < self.momentum < 1, "fine_tune.momentum", self.momentum, "must lie between 0 and 1")
        object.__setattr__(self, "frozen", tuple(self.frozen))  # YAML gives a list

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        return self.lr * min(1.0, (step + 1) / self.warm_up) * 0.5 * (1 + math.cos(math.pi * step / self.steps))
