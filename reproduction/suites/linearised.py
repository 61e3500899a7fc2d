"""Vision towers that are linear in their weights, and their experts, for task arithmetic in the
tangent space.

Source: Ortiz-Jimenez et al., Task Arithmetic in the Tangent Space, NeurIPS 2023 (arXiv 2305.12827,
Eq. 3); gortizji/tangent_task_arithmetic, src/linearize.py, whose experts are trained by the recipe
of those that are not linearised.
"""

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from reproduction.suites.fine_tune import fine_tune_on
from reproduction.suites.recipe import FineTune


class Linearised(nn.Module):
    """f(x; θ₀) + J(x; θ₀) (θ − θ₀) in place of the pooled output f(x; θ) of a vision tower, J =
    ∂f/∂θ.

    base: the tower at θ₀.   moved: its like at θ, all that learns; θ₀ again where left out.
    """

    def __init__(self, base: nn.Module, moved: nn.Module | None = None) -> None:
        super().__init__()
        self.base, self.moved = copy.deepcopy(base), copy.deepcopy(moved or base)

    def forward(self, pixel_values: Tensor) -> BaseModelOutputWithPooling:
        """Pooled (n, h), of pixel_values (n, 3, H, W), with the directional derivative: twice the
        cost of the tower's pass.
        """
        start = {name: p.detach() for name, p in self.base.named_parameters()}
        change = {name: p - start[name] for name, p in self.moved.named_parameters()}

        def pooled(parameters: dict[str, Tensor]) -> Tensor:
            with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no forward derivative
                output: Tensor = functional_call(
                    self.base, parameters, (pixel_values,)
                ).pooler_output
            return output

        value, along = jvp(pooled, (start,), (change,))
        return BaseModelOutputWithPooling(pooler_output=value + along)


def linearised_expert(
    base: nn.Module,
    tensors: Mapping[str, Tensor],
    images: Any,
    settings: FineTune,
    task: str,
    seed: int,
) -> nn.Module:
    """A tower like the base at the weights of a linearised expert: the same images in the same
    order as of the usual expert.

    tensors: of heads.safetensors.   images: the ImageSet of the task's training split.   Raises:
    Diverged.
    """
    settings = settings.but(frozen=("base.", *(f"moved.{name}" for name in settings.frozen)))
    moved: nn.Module = fine_tune_on(images, Linearised(base), tensors, settings, task, seed).moved
    return moved
