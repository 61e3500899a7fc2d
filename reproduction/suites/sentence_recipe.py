"""How an expert of a sentence encoder is trained, as settings; without torch, so that reading a
suite costs nothing.
"""

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from featcal.settings import Settings

Least = NonNegativeFloat


class FineTuneSentences(Settings):
    """AdamW with a linear warm-up and a linear decay to zero; cross-entropy of head · feature /
    temperature.

    frozen: beginnings of the parameter names that stay.
    """

    section = "fine_tune"
    steps: PositiveInt = 100
    lr: Least = 2.0e-4
    batch: PositiveInt = 32
    warm_up: PositiveInt = 20
    decay: Least = 0.01
    clip: Least = 1.0
    temperature: PositiveFloat = 0.05
    frozen: tuple[str, ...] = ()

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        return self.lr * min(
            (step + 1) / self.warm_up, (self.steps - step) / max(self.steps - self.warm_up, 1), 1.0
        )
