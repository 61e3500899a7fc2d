"""What tokens receive in the attention of a block: how much all queries look at each, seen while
the block runs.

Attention is found by the operations that compute it, not by names of modules: a fused attention, or
a softmax over scores (batch, heads, queries, keys). Knows no model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from featcal.errors import BadSetting

SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)


class Attentions(TorchFunctionMode):
    """While active: the shares of every attention, averaged over heads, (batch, queries, keys)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            self.seen.append(shares(*args, **(kwargs or {})).mean(1))
        elif func in SOFTMAX and out.dim() == 4:
            self.seen.append(out.mean(1))
        return out


def shares(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(q kᵀ · scale + mask), (batch, heads, queries, keys): how the fused attention weighs
    its values.
    """
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query @ key.mT * (1 / sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    if attn_mask is not None:
        scores = (
            scores.masked_fill(~attn_mask, -torch.inf)
            if attn_mask.dtype == torch.bool
            else scores + attn_mask
        )
    return F.softmax(scores, dim=-1).nan_to_num()  # a row of padding may see nothing


@contextmanager
def attention_scores() -> Iterator[list[Tensor]]:
    """The shares (batch, queries, keys) of every attention during the next forward, in its
    order.
    """
    with Attentions() as watch:
        yield watch.seen


def received(
    place: str,
    seen: Sequence[Tensor],
    hidden: Tensor,
    mask: Tensor | None,
    fed: Tensor | None,
    fed_mask: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Weights (batch, tokens) of a block's own tokens, and of those that another stack feeds to it,
    with mean 1 in every sample.

    The mean over queries of what a token receives, padding apart. Raises: BadSetting where the
    block shows no such attention.
    """
    keys = [hidden, fed] if fed is not None else [hidden]
    wanted = [(*hidden.shape[:2], each.shape[1]) for each in keys]
    if [tuple(each.shape) for each in seen] != wanted:
        problem = f"must be rule for this model: {place} shows {len(seen)} attentions from each token to each instead of {len(keys)}"
        raise BadSetting("calibrate.weights", "attention", problem)
    found = []
    for each, own_mask in zip(seen, (mask, fed_mask), strict=False):
        total = (each if mask is None else each * mask[..., None].to(each)).sum(1)  # (batch, keys)
        kept = torch.ones_like(total) if own_mask is None else own_mask.to(total)
        total = total * kept
        found.append(
            total
            * kept.sum(1, keepdim=True)
            / total.sum(1, keepdim=True).clamp_min(torch.finfo(total.dtype).tiny)
        )
    return found[0], found[1] if fed is not None else None
