"""How an expert of a sentence encoder is trained, as settings; without torch, so that reading a suite costs nothing."""

from dataclasses import dataclass

from featcal.settings import number, require, whole_number


@dataclass(frozen=True)
class FineTuneSentences:
    """AdamW with a linear warm-up and a linear decay to zero; cross-entropy of head · feature / temperature.

    frozen: beginnings of the parameter names that stay.
    """

    steps: int = 100
    lr: float = 2.0e-4
    batch: int = 32
    warm_up: int = 20
    decay: float = 0.01
    clip: float = 1.0
    temperature: float = 0.05
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "warm_up"):
            whole_number(f"fine_tune.{name}", getattr(self, name))
        for name in ("lr", "decay", "clip", "temperature"):
            number(f"fine_tune.{name}", getattr(self, name))
            require(getattr(self, name) >= 0, f"fine_tune.{name}", getattr(self, name), "must not be negative")
        require(self.temperature > 0, "fine_tune.temperature", self.temperature, "must be above 0")
        object.__setattr__(self, "frozen", tuple(self.frozen))  # YAML gives a list

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        return self.lr * min((step + 1) / self.warm_up, (self.steps - step) / max(self.steps - self.warm_up, 1), 1.0)
