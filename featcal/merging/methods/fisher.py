"""Averages weighted, entry by entry, by how much a model's answers depend on it: Fisher merging and
uncertainty-based gradient matching.

Sources: Matena and Raffel, 2022 (arXiv 2111.09832), with a label drawn from each answer; normalised
as in FusionBench (fusion_bench/method/fisher_merging/fisher_merging.py), which squares one gradient
per batch, where the definition has one per sample. Daheim et al., Model Merging by Uncertainty-Based
Gradient Matching, ICLR 2024 (arXiv 2310.12808); the authors' code (UKPLab/iclr2024-model-merging,
code/uncertainty_based_gradient_matching.py), where H₀ comes from pretraining samples; here, where
these are not available, from the base's answers to the experts' samples. All diagonals are in memory.
"""

from collections.abc import Mapping, Sequence

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat
from torch import Tensor, nn

from featcal.core import generator
from featcal.core.precision import SUM_DTYPE, exact_products
from featcal.errors import BadBatches
from featcal.merging.methods.adamerging import encoder, zero_shot_logits
from featcal.merging.registry import MergeJob, NamedTensors, method
from featcal.merging.sources import Tensors
from featcal.merging.tensors import task_vectors, tensor_sum
from featcal.models.batch import check_batch, check_tasks, naming, single_samples


@torch.enable_grad()  # even under a caller's no_grad
def squared_gradients(
    job: MergeJob,
    model: nn.Module,
    model_tensors: Tensors,
    task: str,
    seed: int,
    purpose: str = "fisher",
) -> tuple[dict[str, Tensor], int]:
    """Return Σ (∂ log p(y | x) / ∂θ)² over the n samples of a task by tensor in float64, and n.

    Each label y is drawn from the model's own p(· | x), with `model_tensors` as θ.
    Raises: BadBatches for a task without samples.
    """
    tensors = {
        name: model_tensors[name].finite().to(job.device).requires_grad_() for name in job.names
    }
    sums = {name: torch.zeros_like(tensor, dtype=SUM_DTYPE) for name, tensor in tensors.items()}
    draws, count = generator(task, purpose, seed), 0
    for number, batch in enumerate(job.batches[task]):
        check_batch(task, number, batch, model)
        for sample in single_samples([batch]):
            with naming(task, number), exact_products():
                logits = zero_shot_logits(job.head, model, tensors, task, sample)  # (1, K)
                log_p = logits.log_softmax(-1)
                label = torch.multinomial(log_p.detach().double().exp().cpu(), 1, generator=draws)
                gradients = torch.autograd.grad(
                    log_p[0, int(label)], list(tensors.values()), allow_unused=True
                )
            for total, gradient in zip(sums.values(), gradients, strict=True):
                if gradient is not None:
                    _add_squares(total, gradient)
            count += 1
    if not count:
        raise BadBatches(task, "is empty; at least one batch with at least one sample is needed")
    job.progress(f"{purpose}: {task}, {count} samples")
    return sums, count


def _add_squares(total: Tensor, gradient: Tensor) -> None:
    """Add gradient² to the total; in a token table only to the few rows that a sample uses."""
    rows = gradient.any(1).nonzero().flatten() if gradient.dim() == 2 else ()
    if gradient.dim() == 2 and len(rows) < len(gradient) // 2:
        total[rows] += gradient[rows].to(total.dtype).square()
    else:
        wide = gradient.to(total.dtype)
        total.addcmul_(wide, wide)


def fisher_weights(
    fishers: Sequence[Mapping[str, Tensor]], floor: float, normalize: bool
) -> list[float]:
    """Return cᵢ = 1 / (‖Fᵢ‖ + floor) over the whole model; 1 without `normalize`."""
    if not normalize:
        return [1.0] * len(fishers)
    return [
        1 / (float(torch.stack([F.square().sum() for F in own.values()]).sum().sqrt()) + floor)
        for own in fishers
    ]


def fisher_tensor(
    base: Tensor, experts: Sequence[Tensor], fishers: Sequence[Tensor], weights: Sequence[float]
) -> Tensor:
    """Return θ = Σ cᵢ Fᵢ θᵢ / Σ cᵢ Fᵢ, entry by entry, in the base's shape and dtype."""
    top, bottom = torch.zeros_like(base, dtype=SUM_DTYPE), torch.zeros_like(base, dtype=SUM_DTYPE)
    for expert, F, c in zip(experts, fishers, weights, strict=True):
        top += c * F * expert.double()
        bottom += c * F
    return (top / bottom).to(base.dtype)


@method(
    source="Matena and Raffel, 2022; normalised as FusionBench does",
    needs=("batches", "head"),
)
def fisher(
    job: MergeJob, normalize: bool = True, floor: PositiveFloat = 1e-6, seed: NonNegativeInt = 42
) -> NamedTensors:
    """Yield every tensor by Fisher merging, Fᵢ = (1/n) Σ (∂ log p(y | x) / ∂θ)².

    normalize: give the diagonals of all experts the same length.
    floor:     added to every entry of them.
    seed:      of the drawn labels.
    """
    check_tasks(job.experts, job.batches)
    model, fishers = encoder(job, "fisher"), []
    for task, expert in job.experts.items():
        sums, count = squared_gradients(job, model, expert, task, seed)
        fishers.append({name: total / count for name, total in sums.items()})
    weights = fisher_weights(fishers, floor, normalize)
    for name in job.names:
        base, experts = job.read(name)
        yield name, fisher_tensor(base, experts, [own[name] + floor for own in fishers], weights)


def matched_tensor(
    base: Tensor, experts: Sequence[Tensor], H0: Tensor, curvatures: Sequence[Tensor], scale: float
) -> Tensor:
    """Return θ = θ₀ + α Σ (H₀ + Hᵢ) τᵢ / (H₀ + α Σ Hᵢ), entry by entry, in the base's shape and dtype.

    A large H₀ gives task arithmetic of scale α; H₀ = 0 with α = 1 gives Fisher merging.
    """
    whole = H0 + scale * tensor_sum(curvatures)
    vectors = task_vectors(base, experts)
    weighted = [(H0 + H) * vector for H, vector in zip(curvatures, vectors, strict=True)]
    return (base.double() + scale * tensor_sum(weighted) / whole).to(base.dtype)


@method(
    source="Daheim et al., 2024",
    needs=("batches", "head"),
    note="the base's curvature comes from its answers to the experts' samples, "
    "as its own samples are not available",
)
def gradient_matching(
    job: MergeJob,
    scale: float = 1.0,
    base_weight: NonNegativeFloat = 1.0,
    floor: PositiveFloat = 1e-12,
    seed: NonNegativeInt = 42,
) -> NamedTensors:
    """Yield every tensor by gradient matching: Hᵢ sums expert i's squared gradients over its task's
    samples, H₀ the base's over all samples, divided by the number of tasks.

    scale:       α of every task vector.
    base_weight: factor of the base's curvature.
    floor:       δ, added to every entry. All defaults but the seed are the authors'.
    seed:        of the drawn labels.
    """
    check_tasks(job.experts, job.batches)
    model = encoder(job, "gradient_matching")

    def curvature(source: Tensors, task: str, purpose: str) -> dict[str, Tensor]:
        return squared_gradients(job, model, source, task, seed, purpose)[0]

    own = [curvature(expert, task, "fisher") for task, expert in job.experts.items()]
    origin = [curvature(job.base, task, "base's fisher") for task in job.experts]
    for name in job.names:
        base, experts = job.read(name)
        H0 = base_weight * tensor_sum([each[name] for each in origin]) / len(origin) + floor
        yield name, matched_tensor(base, experts, H0, [each[name] for each in own], scale)
