"""Fine-tuning an expert from the base: the vision tower learns, text tower, projection and head
stay as they are.

Embeddings and the first LayerNorm stay as well: they lie outside the blocks, where no calibration
could follow the experts. Knows neither files nor where the images come from.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import CLIPVisionModel

from featcal.data.images import ImageSet
from reproduction.suites.descent import batch_indices, descend
from reproduction.suites.recipe import FineTune


def fine_tune(
    vision: CLIPVisionModel,
    projection: Tensor,
    head: Tensor,
    logit_scale: Tensor | float,
    pixel_values: Tensor,
    labels: Tensor,
    *,
    settings: FineTune,
    task: str,
    seed: int,
    normalise: Callable[[Tensor], Tensor] | None = None,
) -> CLIPVisionModel:
    """An expert of `task`: a fine-tuned copy of `vision` in float32, ready for evaluation.

    Minimises the cross-entropy of exp(logit_scale) · head · f / |f| with f = projection · pooled
    output.

    projection:   (p, h) and head (K, p), rows of the head of unit length.   logit_scale: CLIP's
                  parameter, a logarithm.
    pixel_values: (n, 3, H, W), float, or anything that `normalise` turns into that, a batch at a
    time.   labels: (n,), int64.
    Batches are keyed by (task, seed, epoch), so an expert does not depend on which others are made.
    Raises:       Diverged.
    """
    scale = math.exp(float(logit_scale))

    def lesson(step: int) -> TrainingBatch:
        chosen = torch.from_numpy(batch_indices(task, len(labels), settings.batch, step, seed))
        pixels = pixel_values[chosen] if normalise is None else normalise(pixel_values[chosen])
        return TrainingBatch(task, pixels, labels[chosen], head)

    return trained(vision, projection, scale, lesson, settings)


def fine_tune_on(
    images: ImageSet,
    vision: Any,
    tensors: Mapping[str, Tensor],
    settings: FineTune,
    task: str,
    seed: int,
) -> CLIPVisionModel:
    """`fine_tune` on an image set.   tensors: of heads.safetensors."""
    return fine_tune(
        vision,
        tensors["visual_projection"],
        tensors[f"head/{task}"],
        tensors["logit_scale"],
        torch.from_numpy(images.pixels[np.arange(len(images))]),
        torch.from_numpy(images.labels),
        settings=settings,
        task=task,
        seed=seed,
        normalise=lambda pixels: images.preprocess.normalised(pixels.numpy()),
    )


@dataclass(frozen=True)
class TrainingBatch:
    """What one step is trained on."""

    task: str
    pixels: Tensor  # (batch, 3, H, W), normalised
    labels: Tensor  # (batch,)
    head: Tensor  # (K, p)


def trained(
    vision: CLIPVisionModel,
    projection: Tensor,
    scale: float,
    lesson: Callable[[int], TrainingBatch],
    settings: FineTune,
) -> CLIPVisionModel:
    """A copy of `vision` after settings.steps steps, ready for evaluation; lesson(step) is what a
    step is trained on.

    Raises: Diverged with task and step when the loss is not finite.
    """
    learner = copy.deepcopy(vision).float().train()
    learning = [p for name, p in learner.named_parameters() if not name.startswith(settings.frozen)]
    for name, parameter in learner.named_parameters():
        parameter.requires_grad_(not name.startswith(settings.frozen))
    optimiser = torch.optim.SGD(learning, lr=settings.lr, momentum=settings.momentum, nesterov=True)
    device = next(learner.parameters()).device
    projection = projection.to(device).float()
    for step in range(settings.steps):
        now = lesson(step)
        features = F.normalize(
            learner(pixel_values=now.pixels.to(device)).pooler_output @ projection.T, dim=-1
        )
        loss = F.cross_entropy(
            scale * features @ now.head.to(device).float().T, now.labels.to(device)
        )
        descend(
            loss,
            optimiser,
            learning,
            settings,
            now.task,
            step,
            "NaN in the base or in the images of this task",
        )
    learner.zero_grad(set_to_none=True)
    return learner.requires_grad_(True).eval()
