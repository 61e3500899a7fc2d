"""Mergers that treat every entry of the task vectors alike: sums, masks and signs.

Sources: TIES, Yadav et al., 2023, with FusionBench's choices as defaults. Consensus, Wang et al.,
2024 (arXiv 2405.07813) and the authors' code (nik-dim/tall_masks, src/utils/tallmask_utils.py): it
chooses λ of every task on validation data; here all tasks share one. Breadcrumbs, Davari and
Belilovsky, 2024 (arXiv 2312.06795) and the authors' code (rezazzr/breadcrumbs,
src/task_vectors.py: TaskVectorMiddleKeep, first setting to try in find_best_hyperparam.py), which
works on rows, the last axis, where the paper says layers; a linear's row is one output's. DARE,
Yu et al., 2024 (arXiv 2311.03099) and FusionBench, fusion_bench/method/dare. PCB, Du et al., 2024
(arXiv 2410.02396) and the authors' code (duguodong7/pcb-merging, pcb-merging.py; their
vision_source_code/pcb.py clamps 1 % and sums normalised magnitudes), but here β < 0 never wins."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat
from torch import Tensor

from featcal.core import generator
from featcal.merging import tensors
from featcal.merging.registry import MergeJob, NamedTensors, method
from featcal.merging.tensors import in_pieces, kth_smallest, task_vectors, tensor_sum, vector_pieces
from featcal.settings import Fraction, PositiveFraction, require

OUTLIERS = 1e-4  # share of an expert's entries at either end whose magnitudes are clamped
Range = tuple[float, float]  # lowest and highest value
DropRate = Annotated[float, Field(ge=0, lt=1)]


@method(source="Wortsman et al., 2022")
def average(job: MergeJob) -> NamedTensors:
    """Yield θ = (1/N) Σ θᵢ; the base has no part in it."""
    for name in job.names:
        yield name, tensors.average_tensor(*job.read(name))


@method(source="Ilharco et al., 2023", scale=0.3)
def task_arithmetic(job: MergeJob) -> NamedTensors:
    """Yield τ = Σ τᵢ; a scale of 0.3 is the paper's for eight tasks."""
    for name in job.names:
        yield name, tensor_sum(task_vectors(*job.read(name)))


def tall_masks(vectors: Sequence[Tensor], threshold: float) -> Tensor:
    """Return mᵢ = |τᵢ| > λ |Σ τⱼ − τᵢ|: further from the base than from the sum, (experts, ...)."""
    total = tensor_sum(vectors)
    return torch.stack([vector.abs() > threshold * (total - vector).abs() for vector in vectors])


@method(source="Wang et al., 2024", scale=0.3)
def consensus(
    job: MergeJob, threshold: PositiveFloat = 0.6, tasks: NonNegativeInt = 2
) -> NamedTensors:
    """Yield the task vector of every tensor by Consensus TA, τ = m ∘ Σ τᵢ with m = [Σ mᵢ ≥ k].

    threshold: λ of the masks; FusionBench's 0.6 (the authors choose 0.2 to 0.6 per task).
    tasks:     k, the number of tasks to which an entry must matter; 0 is task arithmetic.
    """
    for name in job.names:
        vectors = task_vectors(*job.read(name))
        yield name, (tall_masks(vectors, threshold).sum(0) >= tasks) * tensor_sum(vectors)


def mask_row_entries(vector: Tensor, keep: float, remove: float) -> Tensor:
    """Return m ∘ τ (..., n): of each row ⌊keep · n⌋ entries after its ⌊remove · n⌋ largest."""
    if vector.dim() == 0:
        return vector
    n = vector.shape[-1]
    order = vector.abs().argsort(dim=-1, descending=True, stable=True)
    first = int(n * remove)
    indices = order[..., first : first + int(n * keep)]
    return vector * torch.zeros_like(vector).scatter_(-1, indices, 1.0)


@method(source="Davari and Belilovsky, 2024", scale=0.2)
def breadcrumbs(job: MergeJob, keep: Fraction = 0.15, remove: Fraction = 0.006) -> NamedTensors:
    """Yield the task vector of every tensor by Model Breadcrumbs, τ = Σ mᵢ ∘ τᵢ.

    keep, remove: shares of a row's entries, by magnitude; the authors try these and 0.2 first.
    """
    expected = f"must be at most 1 - remove = {1 - remove:g}"
    require(keep + remove <= 1, "merge.breadcrumbs.keep", keep, expected)
    transposed = tensors.conv1d_names(job.base)
    for name in job.names:
        vectors = [v.T if name in transposed else v for v in task_vectors(*job.read(name))]
        total = tensor_sum([mask_row_entries(vector, keep, remove) for vector in vectors])
        yield name, total.T if name in transposed else total


def trim(vectors: Sequence[Tensor], cuts: Sequence[float]) -> list[Tensor]:
    """Return each τ with 0 where |τ| is below its cut."""
    return [vector * (vector.abs() >= cut) for vector, cut in zip(vectors, cuts, strict=True)]


def ties_tensor(
    vectors: Sequence[Tensor], cuts: Sequence[float], combine: str, majority: Callable[[], float]
) -> Tensor:
    """Return the merged task vector of one tensor, before its scale, in float64.

    The elected sign of an entry is that of Σ τᵢ after the cut, or `majority()`, that of most
    entries of the model, where the sum is exactly 0. Entries of the other sign are dropped; the
    rest is added, or averaged over the experts that remain.
    """
    vectors = trim(vectors, cuts)
    total = tensor_sum(vectors)
    undecided = (total == 0) & torch.stack([vector != 0 for vector in vectors]).any(0)
    positive = total > 0
    if undecided.any():
        positive |= undecided & (majority() > 0)
    agreeing = [torch.where(positive, v.clamp_min(0), v.clamp_max(0)) for v in vectors]
    merged = tensor_sum(agreeing)
    if combine == "mean":
        merged = merged / torch.stack([vector != 0 for vector in agreeing]).sum(0).clamp_min(1)
    return merged


@method(source="Yadav et al., 2023; defaults of FusionBench", scale=0.3)
def ties(
    job: MergeJob, density: PositiveFraction = 0.2, combine: Literal["sum", "mean"] = "sum"
) -> NamedTensors:
    """Yield the task vector of every tensor by TIES; the record keeps each expert's cut.

    density: share of each task vector that is kept, the largest by magnitude: with d entries the
             cut is the (d − ⌊density·d⌋)-th smallest magnitude. A tied tensor counts once.
    combine: "sum" (FusionBench) or "mean" (the method's own paper, with scale=1).
    """
    entries = sum(math.prod(job.base[name].shape) for name in job.names)
    rank = entries - int(entries * density)
    job.progress("ties: magnitudes")
    pieces = partial(vector_pieces, job, *job.names)
    cuts = kth_smallest(pieces, [(i, rank) for i in range(len(job.experts))])
    job.record["cuts"] = dict(zip(job.experts, cuts, strict=True))

    @cache
    def majority() -> float:
        """Return the sign of the sum of all entries' signs over the whole model."""
        total = sum(float(tensor_sum(trim(vectors, cuts)).sign().sum()) for vectors in pieces())
        return float((total > 0) - (total < 0))

    yield from in_pieces(job, lambda vectors: ties_tensor(vectors, cuts, combine, majority))


def with_sparse_experts(job: MergeJob, drop: float, seed: int) -> MergeJob:
    """Return the job with experts θ₀ + m ∘ τᵢ / (1 − p) in float64; mᵢ is 0 with probability p."""

    def sparse(task: str, name: str) -> Tensor:
        base = job.base[name].finite().double()
        vector = job.experts[task][name].finite().double() - base
        # alike at every reading and, drawn on the CPU, on every device
        g = generator(task, f"dare {name}", seed)
        draws = torch.rand(vector.shape, generator=g, dtype=torch.float32)
        return base + vector * (draws >= drop).to(vector.device) / (1 - drop)

    experts = {
        task: {n: replace(lazy, read=partial(sparse, task, n)) for n, lazy in expert.items()}
        for task, expert in job.experts.items()
    }
    return replace(job, experts=experts)


@method(source="Yu et al., 2024, with task arithmetic; defaults of FusionBench", scale=0.3)
def dare(job: MergeJob, drop: DropRate = 0.5, seed: NonNegativeInt = 42) -> NamedTensors:
    """Yield every task vector by task arithmetic on experts whose entries DARE drops."""
    yield from task_arithmetic(with_sparse_experts(job, drop, seed))


@method(source="Yu et al., 2024, with TIES; defaults of FusionBench", scale=0.5)
def dare_ties(
    job: MergeJob,
    density: PositiveFraction = 0.2,
    combine: Literal["sum", "mean"] = "sum",
    drop: DropRate = 0.5,
    seed: NonNegativeInt = 42,
) -> NamedTensors:
    """Yield the task vector of every tensor by TIES on DARE's experts."""
    yield from ties(with_sparse_experts(job, drop, seed), density, combine)


def balance(vector: Tensor, total: Tensor, span: Range, experts: int) -> Tensor:
    """Return βᵢ = exp(N m̂ᵢ²) tanh(τᵢ Σ τⱼ), float64; m̂ᵢ is |τᵢ| clamped and scaled to [0, 1]."""
    low, high = span
    size = (vector.abs().clamp(low, high) - low) / (high - low or 1.0)
    return torch.exp(experts * size.square()) * torch.tanh(vector * total)


def pcb_tensor(vectors: Sequence[Tensor], spans: Sequence[Range], cuts: Sequence[Range]) -> Tensor:
    """Return τ = Σ wᵢ τ̃ᵢ / Σ wᵢ, wᵢ = (max(βᵢ, cut) − cut) / (max βᵢ − cut), with τ̃ᵢ of clamped
    magnitude; 0 where no entry competes. cuts: each expert's smallest competing β, and largest.
    """
    merged, total_weight = torch.zeros_like(vectors[0]), torch.zeros_like(vectors[0])
    total = tensor_sum(vectors)
    for vector, span, (low, high) in zip(vectors, spans, cuts, strict=True):
        beta = balance(vector, total, span, len(vectors))
        w = (beta.clamp_min(low) - low) / (high - low or 1.0)
        merged += w * vector.sign() * vector.abs().clamp(*span)
        total_weight += w
    return merged / total_weight.clamp_min(1e-12)


@method(source="Du et al., 2024", scale=1.2)
def pcb(job: MergeJob, ratio: PositiveFraction = 0.05) -> NamedTensors:
    """Yield the task vector of every tensor by PCB-Merging.

    ratio: share of each expert's entries that compete, of highest β > 0; the authors', as the scale.
    """
    count, entries = len(job.experts), sum(math.prod(job.base[name].shape) for name in job.names)
    job.progress("pcb: magnitudes")
    ends = sorted((int(entries * OUTLIERS) + 1, max(1, int(entries * (1 - OUTLIERS)))))
    pieces = partial(vector_pieces, job, *job.names)
    bounds = kth_smallest(pieces, [(i, k) for i in range(count) for k in ends])
    spans = list(zip(bounds[::2], bounds[1::2], strict=True))

    job.progress("pcb: balance")
    rank = min(entries, int(entries * (1 - ratio)) + 1)
    highest = [0.0] * count

    def balances() -> Iterator[list[Tensor]]:
        """Yield β of every expert; 0 where it opposes the sum, as such entries never win."""
        for vectors in pieces():
            total, betas = tensor_sum(vectors), []
            for i, (vector, span) in enumerate(zip(vectors, spans, strict=True)):
                betas.append(balance(vector, total, span, count).clamp_min(0))
                highest[i] = max(highest[i], float(betas[i].max()))
            yield betas

    lowest = kth_smallest(balances, [(i, rank) for i in range(count)])
    cuts = list(zip(lowest, highest, strict=True))
    yield from in_pieces(job, lambda vectors: pcb_tensor(vectors, spans, cuts))
