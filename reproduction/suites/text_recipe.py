"""How an expert of a language model is trained, as settings; without torch, so that reading a suite
costs nothing.
"""

import math

from pydantic import PositiveFloat, PositiveInt

from featcal.settings import Fraction, Settings


class Lora(Settings):
    """Rank r, α, and the last part of the names of the linear modules that get an adapter."""

    section = "lora"
    rank: PositiveInt = 16
    alpha: PositiveInt = 32
    modules: tuple[str, ...] = ("q", "v")


class FineTuneText(Settings):
    """AdamW, linear warm-up, cosine to zero, on teacher-forced cross-entropy of what follows the
    prompt.

    frozen: beginnings of the names of the parameters that stay. Embeddings and language head lie
    outside the blocks, where no
            calibration could follow the experts (vocabularies of published experts even differ in
            size); a merged model then has those of its experts exactly.
    lora:   train only low-rank adapters, everything else stays; None trains all that is not frozen.
    tokens: at most so many of a text; None for what the model is usually given.
    """

    section = "fine_tune"
    steps: PositiveInt = 100
    lr: PositiveFloat = 1e-3
    batch: PositiveInt = 32
    warm_up: PositiveInt = 10
    decay: Fraction = 0.0
    clip: PositiveFloat = 1.0
    frozen: tuple[str, ...] = ("shared", "lm_head", "model.embed_tokens")
    lora: Lora | None = None
    tokens: PositiveInt | None = None

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        return (
            self.lr
            * min(1.0, (step + 1) / self.warm_up)
            * 0.5
            * (1 + math.cos(math.pi * step / self.steps))
        )
