"""Methods after merging that do not train: REPAIR and SVC.

REPAIR: give the outputs of a merged model's linears the mean and deviation of its experts'.

Source: Jordan et al., REPAIR: REnormalizing Permuted Activations for Interpolation Repair, ICLR 2023
(arXiv 2211.08403): two networks on the same samples. Here N experts, each on the samples of all tasks.

SVC: shrink the singular values of a merged model's change where its experts share directions.

Source: Li et al., When Shared Knowledge Hurts, 2026 (arXiv 2602.05536, Eqs. 4 and 8, Algorithm 1);
FusionBench, fusion_bench/method/singular_value_calibration/utils.py. After Iso-C all singular values
are equal, so the directions that SVC weighs are arbitrary and its result is not reproducible.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from featcal.baselines.training import as_module, together
from featcal.core.precision import exact_products
from featcal.merging.merge import Form
from featcal.merging.registry import NamedTensors
from featcal.merging.sources import Tensors, is_vocabulary, require_alike, source
from featcal.merging.tensors import conv1d_names, task_vectors
from featcal.models.batch import Batch, Model, TaskBatches, single_samples
from featcal.models.blocks import model_call, output_hooks
from featcal.models.load import evaluation_mode, save_model
from featcal.models.modules import solved_modules, weight_of
from featcal.models.plan import blocks_of, plan_for
from reproduction.field.settings import SVC_LEAST

OutputMoments = Mapping[str, Tensor]  # by linear: mean and deviation of its outputs, (2, o)
TINY = 1e-12  # FusionBench's least squared length of an expert's response


def all_samples(batches: TaskBatches) -> Batch:
    """Return the samples of all tasks as one batch."""
    return together("*", [s for task in sorted(batches) for s in single_samples(batches[task])])


def output_moments(models: Iterable[Model], batch: Batch, device: Any) -> OutputMoments:
    """Return each linear's moments, averaged over models."""
    by_linear: dict[str, list[Tensor]] = {}
    for model in models:
        module = as_module(model, device)

        def keep(name: str, output: Tensor) -> None:
            by_linear.setdefault(name, []).append(moments(output, batch))

        run_with(module, keep, batch)
    return {name: torch.stack(values).mean(0) for name, values in by_linear.items()}


def renormalised(
    merged: Model,
    targets: OutputMoments,
    batch: Batch,
    *,
    out: Path | None = None,
    device: Any = "cpu",
) -> nn.Module:
    """Rescale and shift every linear in turn: y' = (y − μ) s / σ + m, to the target m and s."""
    module = as_module(merged, device)

    def change(name: str, output: Tensor) -> Tensor:
        linear, (mean, deviation) = module.get_submodule(name), moments(output, batch)
        factor = torch.where(deviation > 0, targets[name][1] / deviation, 1.0)
        weight, bias = weight_of(linear), linear.bias
        weight.copy_(factor[:, None] * weight)
        result = output * factor.to(output)
        if not isinstance(bias, Tensor):
            return result
        shift = targets[name][0] - factor * mean
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
    names = []
    for stack in plan_for(module).stacks:
        for number, block in enumerate(blocks_of(module, stack)):
            names += [f"{stack.blocks}.{number}.{name}" for name in solved_modules(block)[0]]
    return names


def moments(output: Tensor, batch: Batch) -> Tensor:
    """Return mean and standard deviation over tokens without padding, in float64, (2, o)."""
    mask = batch.get("attention_mask")
    if mask is not None and output.shape[: mask.dim()] == mask.shape:
        output = output[mask.bool()]
    elif mask is not None and output.shape[:-1] == (mask.numel(),):
        output = output[mask.flatten().bool()]
    rows = output.reshape(-1, output.shape[-1]).double()
    return torch.stack([rows.mean(0), rows.std(0, correction=0)])


def svc_matrix(tau: Tensor, vectors: Sequence[Tensor], least: float = SVC_LEAST) -> Tensor:
    """Return Σ γᵣ σᵣ uᵣ vᵣᵀ, where τ = Σ σᵣ uᵣ vᵣᵀ, aᵢ = uᵣᵀ τᵢ and
    γᵣ = N / Σ max(least, ⟨uᵣᵀ τ, aᵢ⟩ / ‖aᵢ‖²), (o, d).

    tau: of the merged model.   vectors: τᵢ of N experts.   All (o, d), float64.
    """
    U, S, Vt = torch.linalg.svd(tau, full_matrices=False)
    coefficients = []
    for vector in vectors:
        response = U.T @ vector  # (r, d)
        along = S * (Vt * response).sum(1)
        coefficients.append((along / response.square().sum(1).clamp_min(TINY)).clamp_min(least))
    factors = len(vectors) / torch.stack(coefficients).sum(0)  # (r,)
    calibrated: Tensor = U * (factors * S) @ Vt
    return calibrated


def svc(
    merged: Model,
    base: Model,
    experts: Mapping[str, Model],
    *,
    least: float = SVC_LEAST,
    out: Path | None = None,
    device: str | torch.device = "cpu",
) -> nn.Module | Path:
    """Apply SVC to every matrix but word embeddings; return the module, or the folder `out`."""
    form, merged_tensors = Form.of(base, experts), source(merged, "merged").tensors
    start = form.source.tensors
    expert_tensors = {t: source(experts[t], f"expert {t!r}").tensors for t in sorted(experts)}
    require_alike(start, {**expert_tensors, "merged": merged_tensors})
    tensors = calibrated_tensors(merged_tensors, start, [*expert_tensors.values()], least, device)
    return form.result(tensors, out)


def calibrated_tensors(
    merged: Tensors, base: Tensors, experts: Sequence[Tensors], least: float, device: Any
) -> NamedTensors:
    """Yield every tensor in the merged model's dtype."""
    turned = conv1d_names(base)
    for name, stored in merged.items():
        tensor = stored.finite()
        if tensor.dim() == 2 and tensor.is_floating_point() and not is_vocabulary(name):
            start = base[name].finite().to(device)
            tensors = [tensor.to(device), *(expert[name].finite().to(device) for expert in experts)]
            vectors = task_vectors(start, tensors)
            if name in turned:  # stored as (d, o)
                vectors = [vector.T for vector in vectors]
            change = svc_matrix(vectors[0], vectors[1:], least)
            change = change.T if name in turned else change
            tensor = (start.double() + change).to(tensor.dtype).cpu()
        yield name, tensor
