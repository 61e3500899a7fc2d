"""Representation Surgery after merging: a low-rank correction for each task."""

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor

from featcal.baselines.adapters import Adapters, Weights
from featcal.baselines.training import Training, adapters_for, as_module
from featcal.models.batch import Batches, Head, Model, output_embeddings
from featcal.settings import require


class Surgery(Training):
    """Settings and formula of `surgery`. T tasks · n rows · d width of a feature.

    The defaults are those of FeatCal's paper and FusionBench. The official repository takes
    features="raw" and reshuffle=2: 500 rounds, each a new shuffle and two batches.
    """

    name: ClassVar[str] = "surgery"
    title: ClassVar[str] = "Representation Surgery"
    section = name
    features: Literal["unit", "raw"] = "unit"
    rank: PositiveInt = 16

    def shapes(self, width: int) -> dict[str, tuple[int, int]]:
        """Return each weight's shape; the first is initialised at random, the other at zero.

        Raises: BadSetting for a rank above the width.
        """
        limit = f"must be at most {width}, the width of the features"
        require(self.rank <= width, "surgery.rank", self.rank, limit)
        return {"down": (self.rank, width), "up": (width, self.rank)}

    def correction(self, weights: Weights, features: Tensor) -> Tensor:
        """Return U relu(D f), which is subtracted from the features (…, n, d)."""
        return (features @ weights["down"].mT).relu() @ weights["up"].mT  # (…, n, r) -> (…, n, d)

    def row_losses(
        self, weights: Weights, merged: Tensor, expert: Tensor, noise: Tensor | None
    ) -> Tensor:
        """Return the mean absolute difference |f' − f_t| of every row, (T, n)."""
        corrected = merged - self.correction(weights, merged)
        return (corrected - expert).abs().mean(-1)


DEFAULT = Surgery()


def surgery(
    merged: Model,
    experts: Mapping[str, Model],
    batches: Mapping[str, Batches],
    *,
    head: Head = None,
    rank: int = DEFAULT.rank,
    steps: int = DEFAULT.steps,
    lr: float = DEFAULT.lr,
    batch: int = DEFAULT.batch,
    reshuffle: int | None = DEFAULT.reshuffle,
    encode: Literal["once", "each_step"] = DEFAULT.encode,
    features: Literal["unit", "raw"] | None = None,
    seed: int = 42,
    device: str | torch.device | None = None,
    progress: Callable[[str], None] | None = None,
) -> Adapters:
    """Train Representation Surgery for each task of a merged model.

    f' = f − U relu(D f) is trained towards the expert's feature of the same sample by the mean
    absolute difference; f (d,) is the merged model's last feature, D (r, d), U (d, r).

    Args:
        merged, experts: modules or checkpoint folders; they are not changed.
        batches: by task, mappings of the model's keyword arguments. Labels are used only to find a
            decoder's tokens.
        head: for CLIP, the weight (p, h) of visual_projection, or a function from pooled output to
            features. Default: the model's own projection, or its language head, before which the
            adapter then is.
        rank: r, at most d. Scale it with the model: the paper's 16 of 512 is 1/32.
        steps, lr, batch: optimiser steps per task, Adam's learning rate, samples per step.
        reshuffle: batches taken from one shuffle of the samples before the next. Default: all.
        encode: "once" computes features once; "each_step" for every batch, as published.
        features: "unit" divides features by their norm, "raw" does not. Default: "unit", or "raw"
            before a language head.
        seed: of the initial weights and the order of samples.
        device: of models given as folders. Default: the CPU.
        progress: called with one line of text every 100 steps.

    Returns: Adapters: apply(task, features), before_head(model, task), save(folder), losses.
    Raises: BadSetting, UnknownKey; BadBatches; Diverged naming task and step.
    Source: Yang et al., Representation Surgery for Multi-Task Model Merging (ICML 2024).
    """
    module = as_module(merged, device)
    if features is None:
        features = "unit" if output_embeddings(module) is None else "raw"
    given = locals()
    settings = Surgery(**{name: given[name] for name in Surgery.model_fields})
    return adapters_for(settings, module, experts, batches, head, seed, device, progress)
