"""Fisher merging: every entry the mean of the experts' weighted by how much their own answers
depend on it.

Source: Matena and Raffel, 2022 (arXiv 2111.09832), with a label drawn from each answer; normalised
as in FusionBench (fusion_bench/method/fisher_merging/fisher_merging.py), which squares one gradient
per batch, where the definition has one per sample. Every expert's diagonal is in memory.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from featcal.blocks.batches import check_batch, check_tasks, naming, single_samples
from featcal.core.precision import SUM_DTYPE, exact_products
from featcal.errors import BadBatches
from featcal.merging.answers import answer_logits, encoder
from featcal.merging.job import Job, Named
from featcal.merging.sources import Source
from featcal.rivals.draws import generator

Diagonal = dict[str, Tensor]  # by name of a tensor, in float64


@torch.enable_grad()  # whatever the caller has switched off
def squared_slopes(
    job: Job, model: nn.Module, answering: Source, task: str, purpose: str = "fisher"
) -> tuple[Diagonal, int]:
    """Σ (∂ log p(y | x) / ∂θ)² over the n samples of a task, y drawn from p(· | x), the own answer
    of one of the models, and n.

    Raises: BadBatches for a task without samples.
    """
    tensors = {
        name: answering.finite_tensor(name).to(job.device).requires_grad_() for name in job.names
    }
    found = {name: torch.zeros_like(tensor, dtype=SUM_DTYPE) for name, tensor in tensors.items()}
    draws, count = generator(task, purpose, job.settings.seed), 0
    for number, batch in enumerate(job.batches[task]):
        check_batch(task, number, batch, model)
        for one in single_samples([batch]):
            with naming(task, number), exact_products():
                answer = answer_logits(job.head, model, tensors, task, one).log_softmax(
                    -1
                )  # (1, K)
                label = torch.multinomial(answer.detach().double().exp().cpu(), 1, generator=draws)
                slopes = torch.autograd.grad(
                    answer[0, int(label)], list(tensors.values()), allow_unused=True
                )
            for name, slope in zip(tensors, slopes, strict=True):
                if slope is not None:
                    add_squares(found[name], slope)
            count += 1
    if not count:
        raise BadBatches(task, "is empty; at least one batch with at least one sample is needed")
    job.progress(f"{purpose}: {task}, {count} samples")
    return found, count


def add_squares(total: Tensor, slope: Tensor) -> None:
    """total += slope²; of a table, of which a sample touches few rows, in those rows alone."""
    rows = slope.any(1).nonzero().flatten() if slope.dim() == 2 else ()
    if slope.dim() == 2 and len(rows) < len(slope) // 2:
        total[rows] += slope[rows].to(total.dtype).square()
    else:
        wide = slope.to(total.dtype)
        total.addcmul_(wide, wide)


def diagonal_fisher(job: Job, model: nn.Module, expert: Source, task: str) -> Diagonal:
    """Fᵢ = (1/n) Σ (∂ log p(y | x) / ∂θ)², y drawn from p(· | x), the expert's own answer to each
    of n samples of its task.
    """
    found, count = squared_slopes(job, model, expert, task)
    return {name: total / count for name, total in found.items()}


def fisher_weights(fishers: Sequence[Diagonal], floor: float, normalize: bool) -> list[float]:
    """cᵢ = 1 / (‖Fᵢ‖ + floor) over the whole model, so that no expert's is larger than another's; 1
    without `normalize`.
    """
    if not normalize:
        return [1.0] * len(fishers)
    return [
        1 / (float(torch.stack([F.square().sum() for F in own.values()]).sum().sqrt()) + floor)
        for own in fishers
    ]


def fisher_tensor(
    base: Tensor, experts: Sequence[Tensor], fishers: Sequence[Tensor], weights: Sequence[float]
) -> Tensor:
    """θ = Σ cᵢ Fᵢ θᵢ / Σ cᵢ Fᵢ, entry by entry. Returns: the base's shape and dtype."""
    total, left = torch.zeros_like(base, dtype=SUM_DTYPE), torch.zeros_like(base, dtype=SUM_DTYPE)
    for expert, F, c in zip(experts, fishers, weights, strict=True):
        total += c * F * expert.double()
        left += c * F
    return (total / left).to(base.dtype)


def fisher(job: Job) -> Iterator[Named]:
    """Every tensor by Fisher merging."""
    check_tasks(job.experts, job.batches)
    chosen, model = job.settings, encoder(job, "fisher")
    fishers = [diagonal_fisher(job, model, expert, task) for task, expert in job.experts.items()]
    weights = fisher_weights(fishers, chosen.floor, chosen.normalize)
    for name in job.names:
        base, experts = job.read(name)
        yield (
            name,
            fisher_tensor(base, experts, [own[name] + chosen.floor for own in fishers], weights),
        )
