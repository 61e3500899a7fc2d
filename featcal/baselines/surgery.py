"""The public function `surgery`: Representation Surgery behind a merged model."""

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch

from featcal.baselines.adapters import Adapters
from featcal.baselines.features import Head, output_embeddings
from featcal.baselines.settings import Surgery
from featcal.baselines.training import adapters_for, as_module
from featcal.models.batch import Batch, Model

DEFAULT = Surgery()


def surgery(
    merged: Model,
    experts: Mapping[str, Model],
    batches: Mapping[str, Iterable[Batch]],
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
    """Train per task f' = f − U relu(D f) on the merged model's last feature, towards the expert's
    feature of the same sample.

    Args:
        merged, experts: modules or checkpoint folders; they stay as they are.
        batches: per task an iterable of keyword mappings for the model's own forward, labels unused
        but for a decoder's tokens.
        head: of CLIP, the weight (p, h) of visual_projection or a function from pooled output to
        features; None where the model
            projects itself or has a language head, before which the adapter then sits.
        rank, steps, seed: the paper's by default; a smaller model wants a smaller rank (16 of 512
        is 1/32).
        lr, batch, reshuffle, encode: as of rivals.settings.Training; SURGERY there names the
        published versions.
        features: "unit" or "raw"; of unit length where left out, and raw before a language head.
        progress: called with one line of text per 100 steps.

    Returns: Adapters: apply(task, features), before_head(model, task), save(folder), losses.
    Raises: BadSetting, UnknownKey; BadBatches; Diverged naming task and step.
    Source: Yang et al., Representation Surgery for Multi-Task Model Merging (ICML 2024).
    """
    module = as_module(merged, device)
    if features is None:
        features = "unit" if output_embeddings(module) is None else "raw"
    settings = Surgery(
        rank=rank,
        steps=steps,
        lr=lr,
        batch=batch,
        reshuffle=reshuffle,
        encode=encode,
        features=features,
    )
    return adapters_for(settings, module, experts, batches, head, seed, device, progress)
