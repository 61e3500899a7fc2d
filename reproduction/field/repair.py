"""REPAIR: give the outputs of a merged model's linears the mean and deviation of its experts'.

Source: Jordan et al., REPAIR: REnormalizing Permuted Activations for Interpolation Repair, ICLR 2023
(arXiv 2211.08403): two networks on the same samples. Here N experts, each on the samples of all tasks.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from featcal.baselines.training import as_module, together
from featcal.core.precision import exact_products
from featcal.models.batch import Batch, Model, TaskBatches, single_samples
from featcal.models.blocks import model_call, output_hooks
from featcal.models.load import evaluation_mode, save_model
from featcal.models.modules import solved_modules, weight_of
from featcal.models.plan import blocks_of, plan_for

Moments = Mapping[str, Tensor]  # by linear: mean and standard deviation of its outputs, (2, o)


def all_samples(batches: TaskBatches) -> Batch:
    """Return the samples of all tasks as one batch."""
    return together("*", [one for task in sorted(batches) for one in single_samples(batches[task])])


def output_moments(models: Iterable[Model], batch: Batch, device: Any) -> Moments:
    """Return each linear's moments, averaged over models."""
    found: dict[str, list[Tensor]] = {}
    for model in models:
        module = as_module(model, device)

        def keep(name: str, output: Tensor) -> None:
            found.setdefault(name, []).append(moments(output, batch))

        run_with(module, keep, batch)
    return {name: torch.stack(own).mean(0) for name, own in found.items()}


def renormalised(
    merged: Model, wanted: Moments, batch: Batch, *, out: Path | None = None, device: Any = "cpu"
) -> nn.Module:
    """Rescale and shift every linear in turn: y' = (y − μ) s / σ + m, with m and s wanted."""
    module = as_module(merged, device)

    def change(name: str, output: Tensor) -> Tensor:
        linear, (mean, deviation) = module.get_submodule(name), moments(output, batch)
        factor = torch.where(deviation > 0, wanted[name][1] / deviation, 1.0)
        weight, bias = weight_of(linear), linear.bias
        weight.copy_(factor[:, None] * weight)
        result = output * factor.to(output)
        if not isinstance(bias, Tensor):
            return result
        shift = wanted[name][0] - factor * mean
        bias.copy_(factor * bias + shift)
        return result + shift.to(output)

    run_with(module, change, batch)
    if out:
        save_model(module, out, like=None if isinstance(merged, nn.Module) else merged)
    return module


def run_with(module: nn.Module, hook: Any, batch: Batch) -> None:
    """Run a model once, with a hook on the output of every linear."""
    with evaluation_mode([module]), exact_products(), output_hooks(module, linears(module), hook):
        module(**model_call(module, batch))


def linears(module: nn.Module) -> list[str]:
    found = []
    for stack in plan_for(module).stacks:
        for number, block in enumerate(blocks_of(module, stack)):
            found += [f"{stack.blocks}.{number}.{name}" for name in solved_modules(block)[0]]
    return found


def moments(output: Tensor, batch: Batch) -> Tensor:
    """Return mean and standard deviation over tokens without padding, in float64, (2, o)."""
    mask = batch.get("attention_mask")
    if mask is not None and output.shape[: mask.dim()] == mask.shape:
        output = output[mask.bool()]
    elif mask is not None and output.shape[:-1] == (mask.numel(),):
        output = output[mask.flatten().bool()]
    rows = output.reshape(-1, output.shape[-1]).double()
    return torch.stack([rows.mean(0), rows.std(0, correction=0)])
