"""Task arithmetic in the tangent space: experts that are trained and run linearised.

The merged model is a tower and its directional derivative, so nothing that solves or changes layers
can be applied to it.

Source: Ortiz-Jimenez et al., Task Arithmetic in the Tangent Space, NeurIPS 2023 (arXiv 2305.12827,
Eq. 3); gortizji/tangent_task_arithmetic, src/linearize.py, which trains the experts by the recipe
of the usual ones.
"""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_outputs import BaseModelOutputWithPooling

import featcal
from featcal.models.load import load_vision, save_model
from reproduction.engine.context import Setup
from reproduction.engine.samples import Selection, load_split
from reproduction.engine.score import averages, highest
from reproduction.engine.spec import ModelSpec
from reproduction.prepare.fine_tune import fine_tune


class Linearised(nn.Module):
    """Pool f(x; θ₀) + J(x; θ₀) (θ − θ₀), J = ∂f/∂θ, in place of a vision tower's f(x; θ).

    base: the tower at θ₀.   moved: the tower at θ, which alone learns. Default: θ₀.
    """

    def __init__(self, base: nn.Module, moved: nn.Module | None = None) -> None:
        super().__init__()
        self.base, self.moved = copy.deepcopy(base), copy.deepcopy(moved or base)

    def forward(self, pixel_values: Tensor) -> BaseModelOutputWithPooling:
        """Return pooled (n, h) of pixel_values (n, 3, H, W), at twice the cost of the tower."""
        start = {name: p.detach() for name, p in self.base.named_parameters()}
        change = {name: p - start[name] for name, p in self.moved.named_parameters()}

        def pooled(parameters: dict[str, Tensor]) -> Tensor:
            with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no forward derivative
                output: Any = functional_call(self.base, parameters, (pixel_values,))
            pooler_output: Tensor = output.pooler_output
            return pooler_output

        value, along = jvp(pooled, (start,), (change,))
        return BaseModelOutputWithPooling(pooler_output=value + along)


def make(
    setup: Setup, study: Any, out: Path, timed: Callable[[str, Callable[[], Any]], Any]
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Write out/merged/ and out/expert/<task>/; return the scale, and all with their accuracy."""
    suite, device, tensors = setup.context.suite, setup.context.device, load_file(setup.heads)
    base, experts = load_vision(setup.base).to(device), {}
    for task in setup.tasks:
        recipe, images = suite.fine_tuning(task), load_split(setup, task, "train")
        recipe = recipe.but(frozen=("base.", *(f"moved.{name}" for name in recipe.frozen)))
        arguments = (Linearised(base), tensors, {task: images}, recipe, suite.expert_seed)
        experts[task] = timed("experts", partial(fine_tune, *arguments)).moved
        save_model(experts[task], out / "expert" / task, like=setup.base)

    def merged(scale: float) -> Any:
        return featcal.merge("task_arithmetic", base, experts, scale=scale, device=device)

    def validated() -> dict[float, float]:
        models = {scale: Linearised(base, merged(scale)) for scale in study.tangent}
        return averages(setup, models, Selection(study.split, study.rows, study.seed))

    values = timed("choosing", validated)
    best = highest(values)
    save_model(timed("merged", partial(merged, best)), out / "merged", like=setup.base)
    return {"scale": best}, [{"scale": s, "value": round(v, 4)} for s, v in values.items()]


def encoder(setup: Setup, model: ModelSpec, task: str) -> Linearised:
    """Return the linearised tower of a task, from the folders that `make` wrote."""
    folder = model.folder / task if model.method == "expert" else model.folder
    return Linearised(load_vision(setup.base), load_vision(folder)).to(setup.context.device)
