"""The two small T5 models: sizes, and first weights drawn parameter by parameter, keyed by seed and
name.
"""

from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

PAD, END = 0, 1


@dataclass(frozen=True)
class T5Size:
    """Width, blocks of the encoder and as many of the decoder, heads, their width, and width of the
    gated feed-forward part.
    """

    width: int
    layers: int
    heads: int
    head_width: int
    inner: int


T5_SIZES = {
    "flan_t5_base": T5Size(width=128, layers=3, heads=4, head_width=24, inner=192),
    "flan_t5_large": T5Size(width=144, layers=4, heads=4, head_width=24, inner=192),
}


def configuration(size: T5Size, vocabulary: int) -> T5Config:
    """As FLAN-T5: gated GELU, outputs not scaled before the head; no dropout in what ships.

    transformers 5 ties the head of every new T5 to the embeddings; `tie_word_embeddings=False` only
    keeps it from scaling.
    """
    own: dict[str, Any] = {
        "tie_word_embeddings": False,
        "pad_token_id": PAD,
        "eos_token_id": END,
        "decoder_start_token_id": PAD,
    }
    return T5Config(
        vocab_size=vocabulary,
        d_model=size.width,
        d_kv=size.head_width,
        d_ff=size.inner,
        num_heads=size.heads,
        num_layers=size.layers,
        num_decoder_layers=size.layers,
        relative_attention_num_buckets=32,
        relative_attention_max_distance=64,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        **own,
    )


def new_t5(size: T5Size, vocabulary: int, seed: int) -> T5ForConditionalGeneration:
    """A model whose every parameter is drawn here; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        model = T5ForConditionalGeneration(configuration(size, vocabulary))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = np.random.default_rng([seed, crc32(name.encode())]).standard_normal(
                tuple(parameter.shape)
            )
            parameter.copy_(_first_value(name, parameter, torch.from_numpy(drawn).float(), size))
    return model


def _first_value(name: str, parameter: Tensor, drawn: Tensor, size: T5Size) -> Tensor:
    """T5's own spreads: queries take in the missing division of attention by the square root of the
    head's width.
    """
    if parameter.ndim == 1:
        return torch.ones_like(parameter)
    if name == "shared.weight":
        return drawn
    if name.endswith(".q.weight"):
        return drawn * (size.width * size.head_width) ** -0.5
    if name.endswith(".wo.weight"):
        return drawn * size.inner**-0.5
    if name.endswith(".o.weight"):
        return drawn * (size.heads * size.head_width) ** -0.5
    return drawn * size.width**-0.5
