"""Features of models, which studies compare with the experts'."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from featcal.evaluation.accuracy import projected_features, require_finite
from featcal.models.blocks import arguments, output_hooks


def projected(
    model: nn.Module, projection: Tensor | None, samples: Any, size: int, location: str
) -> Tensor:
    """Return features (n, p) as they leave the projection, on the CPU. Raises: NotFinite."""
    batches = samples.batches(None, size)
    features = torch.cat([projected_features(model, projection, batch).cpu() for batch in batches])
    require_finite(features, location)
    return features


@contextmanager
def block_outputs(blocks: nn.ModuleList) -> Iterator[dict[str, Tensor]]:
    """Capture the first block's input, "embeddings", and every output, "00", "01", …, by name."""
    features: dict[str, Tensor] = {}

    def entering(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        features["embeddings"] = next(iter(arguments(block, args, kwargs).values()))

    def leaving(name: str, output: Any) -> None:
        features[f"{int(name):02d}"] = output if isinstance(output, Tensor) else output[0]

    first = blocks[0].register_forward_pre_hook(entering, with_kwargs=True)
    with first, output_hooks(blocks, map(str, range(len(blocks))), leaving):
        yield features
