"""How an expert of a sentence encoder is trained, as settings; without torch, so that reading a
suite costs nothing.
"""

from dataclasses import dataclass
from typing import Annotated

from featcal.settings import Checked, Count, Positive, Within

Least = Annotated[float, Within(0)]


@dataclass(frozen=True)
class FineTuneSentences(Checked):
    """AdamW with a linear warm-up and a linear decay to zero; cross-entropy of head · feature /
    temperature.

    frozen: beginnings of the parameter names that stay.
    """

    place = "fine_tune"
    steps: Count = 100
    lr: Least = 2.0e-4
    batch: Count = 32
    warm_up: Count = 20
    decay: Least = 0.01
    clip: Least = 1.0
    temperature: Positive = 0.05
    frozen: tuple[str, ...] = ()

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        return self.lr * min(
            (step + 1) / self.warm_up, (self.steps - step) / max(self.steps - self.warm_up, 1), 1.0
        )
