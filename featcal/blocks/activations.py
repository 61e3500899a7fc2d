"""Activations that transformers writes as several operations, each of which makes a tensor of its
own: the same ones in place.

Every number goes through the same operations in the same order, so no bit changes; what is saved is
memory and the way to it.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers.activations import NewGELUActivation, QuickGELUActivation


def quick_gelu(x: Tensor) -> Tensor:
    """x σ(1.702 x), of CLIP."""
    return (x * 1.702).sigmoid_().mul_(x)


def new_gelu(x: Tensor) -> Tensor:
    """½ x (1 + tanh(√(2/π) (x + 0.044715 x³))), of T5 and GPT-2."""
    return (
        torch.pow(x, 3.0)
        .mul_(0.044715)
        .add_(x)
        .mul_(math.sqrt(2.0 / math.pi))
        .tanh_()
        .add_(1.0)
        .mul_(0.5 * x)
    )


IN_PLACE: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    QuickGELUActivation: quick_gelu,
    NewGELUActivation: new_gelu,
}


@contextmanager
def in_place(block: nn.Module) -> Iterator[None]:
    """Inside, these activations of the block work in place; not where gradients are asked for,
    which need what is between.
    """
    found = (
        []
        if torch.is_grad_enabled()
        else [m for m in block.modules() if type(m) in IN_PLACE and "forward" not in vars(m)]
    )
    for module in found:
        vars(module)["forward"] = IN_PLACE[type(module)]
    try:
        yield
    finally:
        for module in found:
            del vars(module)["forward"]
