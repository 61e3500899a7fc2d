"""One vector for a sample out of what an encoder puts out.

n samples · h width of the encoder.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

CLIP_TEXT = "clip_text_model"  # pools by itself: the token that ends the text


def pooled(model: nn.Module, output: Any, batch: Mapping[str, Any]) -> Tensor | None:
    """(n, h): of texts the mean over the tokens that are no padding, as sentence encoders do; of
    others what the model pools.

    None where there is nothing pooled. Source: Reimers and Gurevych, Sentence-BERT,
    2019; all-MiniLM-L6-v2's 1_Pooling/config.json (pooling_mode_mean_tokens).
    """
    mask, hidden = batch.get("attention_mask"), getattr(output, "last_hidden_state", None)
    of_clip = getattr(getattr(model, "config", None), "model_type", None) == CLIP_TEXT
    if (
        of_clip
        or not isinstance(mask, Tensor)
        or not isinstance(hidden, Tensor)
        or mask.shape != hidden.shape[:2]
    ):
        found: Tensor | None = getattr(output, "pooler_output", None)
        return found
    return token_mean(hidden, mask)


def token_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens of hidden (n, tokens, h) where mask (n, tokens) is 1, (n, h)."""
    counted = mask.to(hidden)[..., None]
    total: Tensor = (hidden * counted).sum(1) / counted.sum(1)
    return total
