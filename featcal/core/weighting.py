"""How much each token counts in the sums over tokens.

A rule maps (name of the module inside its block, is this the last block, shape (batch, tokens)) to
weights of that shape.
Padding is not a matter of the rule: it always counts nothing. Knows shapes and module names, no
models.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from featcal.core.precision import SUM_DTYPE

TokenRule = Callable[[str, bool, tuple[int, ...]], Tensor]

PATCH_WEIGHT = 0.01  # of a patch token in CLIP's last block, from the paper's released code


def every_token(module: str, last: bool, shape: tuple[int, ...]) -> Tensor:
    """Every token counts alike."""
    return torch.ones(shape, dtype=SUM_DTYPE)


def class_token_last(module: str, last: bool, shape: tuple[int, ...]) -> Tensor:
    """CLIP's rule: after the last block only the class token is read, so there patch tokens count
    0.01.

    Keys and values of the last block are the exception: the class token reads them at every patch.
    """
    w = torch.ones(
        shape, dtype=SUM_DTYPE
    )  # 0.01 in float32 would be off by 2e-8 in a float64 model
    if last and not module.endswith(("k_proj", "v_proj")):
        w[..., 1:] = PATCH_WEIGHT
    return w


def token_weights(
    rule: TokenRule, module: str, last: bool, like: Tensor, mask: Tensor | None
) -> Tensor:
    """Weights (batch, tokens) of a module's input `like` (batch, tokens, d): the rule's, with
    padding at 0.
    """
    w = rule(module, last, tuple(like.shape[:-1])).to(device=like.device, dtype=like.dtype)
    return w if mask is None else w * mask.to(w)
