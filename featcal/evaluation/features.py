"""The feature of a picture that is compared with a head: pooled, projected, normalised.

n pictures · h width of the vision tower · p width shared with text
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from featcal.errors import NotFinite

# a vision model, or a function from pixel values to projected features (n, p): a model with adapters behind it, say
Vision = nn.Module | Callable[[Tensor], Tensor]


class Pictures(Protocol):
    """What evaluation needs of an image set: labels (n,) in the order of its batches, and class names by label."""

    @property
    def labels(self) -> Any: ...
    @property
    def classes(self) -> Sequence[str]: ...
    def batches(self, indices: None, size: int) -> Iterable[dict[str, Tensor]]: ...


def image_features(vision: Vision, projection: Tensor, pixel_values: Tensor) -> Tensor:
    """Unit-length features of one batch, (n, p).

    projection: weight of visual_projection, (p, h); always the base's.
    """
    return unit_length(projected_features(vision, projection, pixel_values))


@torch.no_grad()
def projected_features(vision: Vision, projection: Tensor, pixel_values: Tensor) -> Tensor:
    """Features of one batch as they leave the projection, (n, p)."""
    if isinstance(vision, nn.Module):
        weight = next(vision.parameters())
        pooled = vision(pixel_values=pixel_values.to(weight.device, weight.dtype)).pooler_output  # (n, h)
        return pooled @ projection.to(pooled).T  # (n, p)
    return vision(pixel_values)


def unit_length(features: Tensor) -> Tensor:
    """Every row divided by its norm."""
    return features / features.norm(dim=-1, keepdim=True)


def features_of(vision: Vision, projection: Tensor, images: Pictures, batch: int, place: str = "model") -> Tensor:
    """Unit-length features of a whole image set, (n, p), on the CPU. Raises: NotFinite naming `place`."""
    found = []
    for inputs in images.batches(None, batch):
        features = image_features(vision, projection, inputs["pixel_values"])
        require_finite(features, place)
        found.append(features.cpu())
    return torch.cat(found)


def require_finite(features: Tensor, place: str) -> None:
    """Raise NotFinite unless all features are numbers."""
    if not torch.isfinite(features).all():
        raise NotFinite(place, "its image features")
