"""LayerNorm and RMSNorm behind one view: the normalised features before scale and shift."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def is_norm(module: nn.Module) -> bool:
    """Whether the module normalises its last axis and has a scale this package can solve."""
    weight = getattr(module, "weight", None)
    known = isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("RMSNorm")
    return known and isinstance(weight, Tensor) and weight.dim() == 1


def shift_of(module: nn.Module) -> Tensor | None:
    """The shift (d,), or None for RMSNorm and for LayerNorm without one."""
    shift = getattr(module, "bias", None)
    return shift.detach() if isinstance(shift, Tensor) else None


def normalised(module: nn.Module, x: Tensor) -> Tensor:
    """LN₀(x) of Eq. 56: x (..., d) with the module's own numerical constant, without its scale and shift."""
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, eps=module.eps)
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or torch.finfo(x.dtype).eps
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
