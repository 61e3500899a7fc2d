"""Features of a batch as a model's head receives them, one row per image or token.

n samples · d width of a feature · p width of a projected one.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from featcal.errors import BadPlan, BadSetting
from featcal.models.batch import Batch, pad_token, padding_mask, pooled_output
from featcal.models.blocks import model_call, module_inputs

Head = Tensor | Callable[[Tensor], Tensor] | Mapping[str, Tensor] | None


def rows_before_head(model: nn.Module, batch: Batch, head: Head) -> tuple[Tensor, Tensor]:
    """Return the rows (rows, d) of one batch without padding, and each sample's count (n,)."""
    language_head = output_embeddings(model)
    if language_head is None:
        features = projected(model, batch, head)
        return features, torch.ones(len(features), dtype=torch.long)
    if head is not None and head is not language_head:
        expected = "must be left out for a model with a language head of its own"
        raise BadSetting("head", type(head).__name__, expected)
    name = next(name for name, part in model.named_modules() if part is language_head)
    with module_inputs(model, [name], enough=lambda: True) as inputs:
        model(**model_call(model, batch))
    hidden = inputs[name]  # (n, tokens, d)
    config: Any = model.config
    keyword = "decoder_attention_mask" if config.is_encoder_decoder else "attention_mask"
    mask = padding_mask(batch, hidden, keyword, pad_token(model))
    used = hidden.new_ones(hidden.shape[:2]).bool() if mask is None else mask.bool()
    return hidden[used], used.sum(1).cpu()


def output_embeddings(model: nn.Module) -> nn.Module | None:
    """Return the language head of a transformers model, if it has one."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return head if isinstance(head, nn.Module) else None


def projected(model: nn.Module, batch: Batch, head: Head) -> Tensor:
    """Return features (n, p) of one batch by a model without a language head.

    Raises: BadSetting, BadPlan.
    """
    output: Any = model(**model_call(model, batch))
    vectors = output if isinstance(output, Tensor) else pooled_output(model, output, batch)
    if vectors is None:
        problem = "has neither image_embeds nor pooler_output"
        raise BadPlan(type(output).__name__, problem, "give a model that pools its features")
    weight = head.get("visual_projection") if isinstance(head, Mapping) else head
    if head is None:
        return vectors
    if isinstance(weight, Tensor):
        if weight.dim() != 2 or weight.shape[1] != vectors.shape[1]:
            wanted = f"must have shape (p, {vectors.shape[1]}), as the weight of visual_projection"
            raise BadSetting("head", tuple(weight.shape), wanted)
        return vectors @ weight.to(vectors).T
    if not callable(weight):
        wanted = "must be the weight (p, h) of visual_projection, or a function"
        raise BadSetting("head", type(head).__name__, wanted)
    return weight(vectors)
