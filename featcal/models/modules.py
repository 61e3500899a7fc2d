"""The two kinds of linear behind one view: nn.Linear keeps its weight as (o, d), GPT-2's Conv1D as
(d, o).

Everything else of the package sees (o, d). Several linears of one site are read and written side by
side."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from featcal.errors import BadSetting


def is_linear(module: nn.Module) -> bool:
    """Whether the module is a linear this package can solve."""
    return isinstance(module, nn.Linear | Conv1D)


def weight_of(module: nn.Module) -> Tensor:
    """The weight as (o, d), sharing memory with the module."""
    assert isinstance(module.weight, Tensor)
    return module.weight.detach().T if isinstance(module, Conv1D) else module.weight.detach()


def bias_of(module: nn.Module) -> Tensor:
    """The bias (o,); zeros where the linear has none."""
    if isinstance(module.bias, Tensor):
        return module.bias.detach()
    weight = weight_of(module)
    return weight.new_zeros(weight.shape[0])


def side_by_side(modules: Iterable[nn.Module]) -> tuple[Tensor, Tensor]:
    """Weight (Σo, d) and bias (Σo,) of linears that share their input."""
    modules = list(modules)
    return torch.cat([weight_of(m) for m in modules]), torch.cat([bias_of(m) for m in modules])


def load_side_by_side(modules: Iterable[nn.Module], weight: Tensor, bias: Tensor | None) -> None:
    """Write weight (Σo, d) and, unless None, bias (Σo,) back into the linears, in each one's own
    precision.
    """
    start = 0
    for module in modules:
        target = weight_of(module)
        rows = slice(start, start + target.shape[0])
        target.copy_(weight[rows])
        if bias is not None and isinstance(module.bias, Tensor):
            module.bias.detach().copy_(bias[rows])
        start = rows.stop


AGREEMENT = (
    0.02  # of a norm's output; bfloat16 keeps 8 bits, while another kind of norm is off by far more
)


def is_norm(module: nn.Module) -> bool:
    """Whether the module is named a norm of its last axis and has a scale."""
    weight = getattr(module, "weight", None)
    known = isinstance(module, nn.LayerNorm) or type(module).__name__.endswith(
        ("RMSNorm", "LayerNorm")
    )
    return known and isinstance(weight, Tensor) and weight.dim() == 1


def shift_of(module: nn.Module) -> Tensor | None:
    """The shift (d,), or None for RMSNorm and for LayerNorm without one."""
    shift = getattr(module, "bias", None)
    return shift.detach() if isinstance(shift, Tensor) else None


def normalised(module: nn.Module, x: Tensor) -> Tensor:
    """LN₀(x) of Eq. 56: x (..., d) with the module's own numerical constant, without its scale and
    shift.
    """
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, eps=module.eps)
    eps = (
        getattr(module, "variance_epsilon", None)
        or getattr(module, "eps", None)
        or torch.finfo(x.dtype).eps
    )
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def check_norm(module: nn.Module) -> None:
    """Raise BadSetting for a module that does not scale and shift what `normalised` gives, seen
    from a few numbers.

    Gemma's norms multiply by 1 + weight. Eqs. 56-59 need not know: a constant added to every scale,
    the anchor's included, comes out added to the solution.
    """
    weight, shift = module.get_parameter("weight").detach(), shift_of(module)
    x = torch.linspace(-1, 2, weight.numel(), dtype=weight.dtype, device=weight.device)[None]
    z = normalised(module, x)
    with torch.no_grad():
        unscaled = module(x) if shift is None else module(x) - shift
    size = unscaled.norm().clamp_min(torch.finfo(x.dtype).tiny)
    if (
        not min(float((unscaled - z * scale).norm() / size) for scale in (weight, 1 + weight))
        <= AGREEMENT
    ):
        kind = type(module).__name__
        raise BadSetting(
            "calibrate.norm",
            True,
            f"must be off for models with {kind}, which is neither LayerNorm nor RMSNorm",
        )
