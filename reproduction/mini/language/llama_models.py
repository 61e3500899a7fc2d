"""The two Llama bases: sizes, and first weights drawn parameter by parameter from seed and name."""

from dataclasses import dataclass
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from reproduction.mini.language.llama_tokenizer import BOS, EOS, LONGEST, PAD, SPECIALS, VOCABULARY

EMBEDDING_SPREAD = 0.05


@dataclass(frozen=True)
class Size:
    """Of a Llama; `groups` are its key and value heads."""

    hidden: int
    layers: int
    heads: int
    groups: int
    mlp: int
    tied: bool


SIZES = {
    "llama_3b": Size(hidden=128, layers=4, heads=4, groups=2, mlp=256, tied=True),
    "llama_8b": Size(hidden=128, layers=5, heads=4, groups=2, mlp=224, tied=False),
}


def configuration(size: Size) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.groups,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=size.tied,
        pad_token_id=SPECIALS.index(PAD),
        bos_token_id=SPECIALS.index(BOS),
        eos_token_id=SPECIALS.index(EOS),
        rms_norm_eps=1e-5,
    )


def new_model(size: Size, seed: int) -> LlamaForCausalLM:
    """A Llama whose every parameter is drawn here; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(configuration(size))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                _first_value(
                    name,
                    parameter,
                    model.config,
                    np.random.default_rng([seed, crc32(name.encode())]),
                )
            )
    return model


def _first_value(
    name: str, parameter: Tensor, config: LlamaConfig, generator: np.random.Generator
) -> Tensor:
    if "norm" in name:
        return torch.ones_like(parameter)
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        spread = EMBEDDING_SPREAD
    else:
        spread = parameter.shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            spread *= (2 * config.num_hidden_layers) ** -0.5
    return torch.from_numpy(spread * generator.standard_normal(tuple(parameter.shape))).float()
