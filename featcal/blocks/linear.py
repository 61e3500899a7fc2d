"""The two kinds of linear behind one view: nn.Linear keeps its weight as (o, d), GPT-2's Conv1D as
(d, o).

Everything else of the package sees (o, d). Several linears of one site are read and written side by
side.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


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
