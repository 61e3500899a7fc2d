"""Tensor names of open_clip's CLIP beside those of transformers' CLIPModel, and the renaming both
ways.

open_clip keeps q, k and v of a block in one tensor and stores both projections transposed. Nothing
is computed, so no bit changes. Knows neither files nor configurations, and does not need open_clip.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pair:
    """One tensor of open_clip and what it is in transformers: one tensor, or q, k and v stacked
    along the first axis.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False


_PARTS = {
    "logit_scale": "logit_scale",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
}
_NORMS = {
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
    "ln_final": "text_model.final_layer_norm",
}
_PROJECTIONS = {
    "visual.proj": "visual_projection.weight",
    "text_projection": "text_projection.weight",
}
_IN_BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_STACKS = {
    "visual.transformer.resblocks": "vision_model.encoder.layers",
    "transformer.resblocks": "text_model.encoder.layers",
}


def pairs(vision_layers: int, text_layers: int) -> Iterator[Pair]:
    """Every tensor of a CLIP with so many blocks in its towers."""
    yield from (Pair(theirs, (ours,)) for theirs, ours in _PARTS.items())
    yield from (Pair(theirs, (ours,), transposed=True) for theirs, ours in _PROJECTIONS.items())
    for kind in ("weight", "bias"):
        yield from (
            Pair(f"{theirs}.{kind}", (f"{ours}.{kind}",)) for theirs, ours in _NORMS.items()
        )
        for (theirs, ours), layers in zip(
            _STACKS.items(), (vision_layers, text_layers), strict=True
        ):
            for i in range(layers):
                yield from (
                    Pair(f"{theirs}.{i}.{a}.{kind}", (f"{ours}.{i}.{b}.{kind}",))
                    for a, b in _IN_BLOCK.items()
                )
                fused = tuple(f"{ours}.{i}.self_attn.{letter}_proj.{kind}" for letter in "qkv")
                yield Pair(f"{theirs}.{i}.attn.in_proj_{kind}", fused)


def in_our_names(
    state: Mapping[str, Tensor], vision_layers: int, text_layers: int
) -> dict[str, Tensor]:
    """A state dict of open_clip under transformers' names; every tensor has memory of its own."""
    renamed = {}
    for pair in pairs(vision_layers, text_layers):
        tensor = state[pair.theirs].T if pair.transposed else state[pair.theirs]
        parts = tensor.chunk(len(pair.ours)) if len(pair.ours) > 1 else (tensor,)
        for name, part in zip(pair.ours, parts, strict=True):
            renamed[name] = part.clone(memory_format=torch.contiguous_format)
    return renamed


def in_their_names(
    state: Mapping[str, Tensor], vision_layers: int, text_layers: int
) -> dict[str, Tensor]:
    """A state dict of transformers' CLIPModel under open_clip's names; also of tensors that have a
    shape only (device meta).
    """
    renamed = {}
    for pair in pairs(vision_layers, text_layers):
        parts = [state[name] for name in pair.ours]
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        renamed[pair.theirs] = (tensor.T if pair.transposed else tensor).contiguous()
    return renamed
