"""The feature of a picture or a sentence that is compared with a head: pooled, of pictures
projected, normalised.

n pictures or sentences · h width of the model · p width of a head. Where nothing is projected, p is
h.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from featcal.errors import NotFinite
from featcal.models.pooling import pooled

# a model, or a function from a batch's keywords to projected features (n, p): a model with adapters
# behind it, say
Encoder = nn.Module | Callable[[Mapping[str, Tensor]], Tensor]


class Samples(Protocol):
    """What evaluation needs of pictures or sentences: labels (n,) in the order of the batches, and
    class names by label.
    """

    @property
    def labels(self) -> Any: ...
    @property
    def classes(self) -> Sequence[str]: ...
    def batches(self, indices: None, size: int) -> Iterable[dict[str, Tensor]]: ...


def unit_features(
    model: Encoder, projection: Tensor | None, inputs: Mapping[str, Tensor]
) -> Tensor:
    """Unit-length features of one batch, (n, p).

    projection: of CLIP, weight of visual_projection, (p, h); always the base's. None of a model
    that projects nothing.
    """
    return unit_length(projected_features(model, projection, inputs))


@torch.no_grad()
def projected_features(
    model: Encoder, projection: Tensor | None, inputs: Mapping[str, Tensor]
) -> Tensor:
    """Features of one batch as they leave the projection, (n, p); inputs: keywords of the model's
    forward.
    """
    if not isinstance(model, nn.Module):
        return model(inputs)
    weight = next(model.parameters())
    placed = {
        name: x.to(weight.device, weight.dtype if x.is_floating_point() else None)
        for name, x in inputs.items()
    }
    vectors = pooled(model, model(**placed), placed)  # (n, h)
    assert vectors is not None
    return vectors if projection is None else vectors @ projection.to(vectors).T  # (n, p)


def unit_length(features: Tensor) -> Tensor:
    """Every row divided by its norm."""
    return features / features.norm(dim=-1, keepdim=True)


def features_of(
    model: Encoder, projection: Tensor | None, samples: Samples, batch: int, place: str = "model"
) -> Tensor:
    """Unit-length features of a whole set, (n, p), on the CPU. Raises: NotFinite naming `place`."""
    found = []
    for inputs in samples.batches(None, batch):
        features = unit_features(model, projection, inputs)
        require_finite(features, place)
        found.append(features.cpu())
    return torch.cat(found)


def require_finite(features: Tensor, place: str) -> None:
    """Raise NotFinite unless all features are numbers."""
    if not torch.isfinite(features).all():
        raise NotFinite(place, "its features")
