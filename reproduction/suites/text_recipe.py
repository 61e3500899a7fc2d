"""How an expert of a language model is trained, as settings; without torch, so that reading a suite costs nothing."""

import math
from dataclasses import dataclass
from typing import Any

from featcal.settings import from_mapping, number, require, whole_number


@dataclass(frozen=True)
class Lora:
    """Rank r, α, and the last part of the names of the linear modules that get an adapter."""

    rank: int = 16
    alpha: int = 32
    modules: tuple[str, ...] = ("q", "v")

    def __post_init__(self) -> None:
        for name in ("rank", "alpha"):
            whole_number(f"lora.{name}", getattr(self, name))
        object.__setattr__(self, "modules", tuple(self.modules))  # YAML gives a list


@dataclass(frozen=True)
class FineTuneText:
    """AdamW, linear warm-up, cosine to zero, on teacher-forced cross-entropy of what follows the prompt.

    frozen: beginnings of the names of the parameters that stay. Embeddings and language head lie outside the blocks, where no
            calibration could follow the experts (vocabularies of published experts even differ in size); a merged model then has
            those of its experts exactly.
    lora:   train only low-rank adapters, everything else stays; None trains all that is not frozen.
    tokens: at most so many of a text; None for what the model is usually given.
    """

    steps: int = 100
    lr: float = 1e-3
    batch: int = 32
    warm_up: int = 10
    decay: float = 0.0
    clip: float = 1.0
    frozen: tuple[str, ...] = ("shared", "lm_head", "model.embed_tokens")
    lora: Lora | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "warm_up"):
            whole_number(f"fine_tune.{name}", getattr(self, name))
        for name in ("lr", "clip"):
            number(f"fine_tune.{name}", getattr(self, name))
            require(getattr(self, name) > 0, f"fine_tune.{name}", getattr(self, name), "must be above 0")
        number("fine_tune.decay", self.decay)
        require(0 <= self.decay < 1, "fine_tune.decay", self.decay, "must lie in [0, 1)")
        if self.tokens is not None:
            whole_number("fine_tune.tokens", self.tokens)
        object.__setattr__(self, "frozen", tuple(self.frozen))  # YAML gives a list
        given: Any = self.lora
        if isinstance(given, dict):
            object.__setattr__(self, "lora", from_mapping(Lora, given, "fine_tune.lora"))

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        return self.lr * min(1.0, (step + 1) / self.warm_up) * 0.5 * (1 + math.cos(math.pi * step / self.steps))
