"""Match the rows of a module's input to tokens, and weigh them.

Most inputs are (batch, tokens, d). Some modules read flattened rows (rows, d), norms of attention
read one row per head, and keys and values of cross-attention read another stack's tokens, which
have their own padding.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from featcal.blocks.experts import expert_of
from featcal.core.weighting import TokenRule, token_weights
from featcal.errors import BadCapture


@dataclass(frozen=True)
class Tokens:
    """The tokens of one batch in one stack, and those fed to it by another stack."""

    hidden: Tensor  # (batch, tokens, d), what reaches the block
    mask: Tensor | None = None  # (batch, tokens), 0 at padding
    fed: Tensor | None = None  # (batch, other tokens, d)
    fed_mask: Tensor | None = None
    routed: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # expert of a mixture -> row numbers of the tokens it is given


def weights(
    place: str, name: str, x: Tensor, tokens: Tokens, rule: TokenRule, last: bool
) -> Tensor:
    """Return the token weights of one module's input x (..., d), shaped x.shape[:-1].

    Raises: BadCapture where the rows are not the tokens of the batch.
    """
    hidden, mask = tokens.hidden, tokens.mask
    if tokens.fed is not None and same_memory(x, tokens.fed):
        hidden, mask = tokens.fed, tokens.fed_mask
    batch, count = hidden.shape[:2]
    w = token_weights(rule, name, last, x.new_empty(batch, count, 0), mask)  # (batch, tokens)
    w = w if x.dtype == torch.float64 else w.float()
    if expert := expert_of(name, tokens.routed):
        return w.flatten()[tokens.routed[expert]]
    if x.shape[:-1] == (batch, count):
        return w
    if x.shape[:-1] == (batch * count,):
        return w.flatten()
    axis = token_axis(x, batch, count)
    if axis is None:
        wanted = f"instead of ({batch} sequences, {count} tokens, features)"
        raise BadCapture([f"{place}.{name}"], f"its input has shape {tuple(x.shape)} {wanted}")
    return w.unsqueeze(2 if axis == 1 else 1).expand(x.shape[:-1])


def token_axis(x: Tensor, batch: int, count: int) -> int | None:
    """Return the token axis of (batch, tokens, heads, d) or (batch, heads, tokens, d).

    With as many heads as tokens it is the axis with the larger stride.
    """
    if x.dim() != 4 or x.shape[0] != batch:
        return None
    fitting = [axis for axis in (1, 2) if x.shape[axis] == count]
    return max(fitting, key=x.stride, default=None)


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Return whether two live tensors are the same view of the same memory; also for meta
    tensors.
    """
    alike = (
        x.shape == y.shape and x.stride() == y.stride() and x.storage_offset() == y.storage_offset()
    )
    return alike and x.untyped_storage()._cdata == y.untyped_storage()._cdata
