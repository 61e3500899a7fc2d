"""Arithmetic on tensors of a base and its experts: task vectors, exact order statistics, matrices.

Sums run in float64: the mean of equal experts is exact. Names and shapes show which are matrices.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from featcal.errors import FeatCalError
from featcal.merging.registry import MergeJob, NamedTensors
from featcal.merging.sources import VOCABULARY, Tensors, is_vocabulary
from featcal.settings import require

PIECE = 1 << 20  # entries processed at a time: few enough for a cache
STACKED = (("q_proj", "k_proj", "v_proj"), ("q", "k", "v"), ("query", "key", "value"))
POSITION_TABLE = "relative_attention_bias.weight"  # in T5's first block, no linear
CONV1D = re.compile(r"\.(c_attn|q_attn|c_proj|c_fc)\.weight$")


def task_vectors(base: Tensor, experts: Sequence[Tensor]) -> list[Tensor]:
    """Return τᵢ = θᵢ − θ₀ in float64, one per expert."""
    return [expert.double() - base.double() for expert in experts]


def tensor_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Return Σ over a sequence, in its order."""
    return sum(tensors[1:], tensors[0])


def average_tensor(base: Tensor, experts: Sequence[Tensor]) -> Tensor:
    """Return θ = (1/N) Σ θᵢ, in the base's shape and dtype."""
    return (tensor_sum([expert.double() for expert in experts]) / len(experts)).to(base.dtype)


def add_task_vector(base: Tensor, vector: Tensor, scale: float) -> Tensor:
    """Return θ₀ + s τ, rounded once to the base's dtype."""
    return (base.double() + scale * vector).to(base.dtype)


def vector_pieces(job: MergeJob, *names: str) -> Iterator[list[Tensor]]:
    """Yield the same entries of every expert's task vector of these tensors, flat."""
    for name in names:
        base, experts = job.read(name)
        flat = [torch.split(tensor.flatten(), PIECE) for tensor in (base, *experts)]
        for base_piece, *expert_pieces in zip(*flat, strict=True):
            yield task_vectors(base_piece, expert_pieces)


def in_pieces(job: MergeJob, rule: Callable[[list[Tensor]], Tensor]) -> NamedTensors:
    """Yield `rule(vectors)` of every tensor in float64, computed on flat pieces."""
    for name in job.names:
        shape = job.base[name].shape
        merged = torch.empty(math.prod(shape), dtype=torch.float64, device=job.device)
        for piece, vectors in zip(merged.split(PIECE), vector_pieces(job, name), strict=True):
            piece.copy_(rule(vectors))
        yield name, merged.reshape(shape)


def kth_smallest(
    read: Callable[[], Iterator[Sequence[Tensor]]], wanted: Sequence[tuple[int, int]]
) -> list[float]:
    """Return the exact k-th smallest magnitude (from 1; 0 for k = 0) in a stream, per (stream, k).

    The bits of positive doubles sort as their values do. Each of four readings counts the values
    that share the known leading bits by their next 16 bits.
    read: yields the next values of every stream: flat, float64, finite.
    """
    ranks, prefixes = [k for _, k in wanted], [0] * len(wanted)
    for shift in (48, 32, 16, 0):
        counts = torch.zeros(len(wanted), 1 << 16, dtype=torch.int64)
        for values in read():
            for i, (stream, _) in enumerate(wanted):
                bits = values[stream].abs().view(torch.int64) >> shift
                following = bits[bits >> 16 == prefixes[i]] & 0xFFFF
                counts[i] += torch.bincount(following, minlength=1 << 16).cpu()
        reached = counts.cumsum(1)
        for i, rank in enumerate(ranks):
            bucket = int(torch.searchsorted(reached[i], rank))
            ranks[i] = rank - int(reached[i, bucket] - counts[i, bucket])
            prefixes[i] = prefixes[i] << 16 | bucket
    return torch.tensor(prefixes, dtype=torch.int64).view(torch.float64).tolist()


def matrix_names(job: MergeJob, exclude: tuple[str, ...]) -> list[str]:
    """Return the names of tensors with two axes, as FusionBench does, except `exclude`."""
    for pattern in set(exclude) - {*VOCABULARY}:
        used = any(is_vocabulary(name, (pattern,)) for name in job.names)
        expected = "must be the name of a tensor, with * for any letters, such as *q_proj.weight"
        require(used, "merge.exclude", pattern, expected)
    names = [name for name in job.names if not is_vocabulary(name, exclude)]
    if packed := [n for n in names if len(job.base[n].shape) == 3 and n.endswith("_proj")]:
        problem = "packs the matrices of a mixture's experts, which this method merges one by one"
        average = "or average it: name it in exclude, with the token tables of the default"
        raise FeatCalError(packed[0], problem, "give folders that hold each matrix", average)
    return [name for name in names if len(job.base[name].shape) == 2]


def linear_groups(job: MergeJob, exclude: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the linears of numbered blocks; q, k and v of one attention are one group."""
    by_parent: dict[str, dict[str, str]] = {}
    for name in matrix_names(job, exclude):
        if re.search(r"\.\d+\..*\.weight$", name) and not name.endswith(POSITION_TABLE):
            parent, _, linear = name.removesuffix(".weight").rpartition(".")
            by_parent.setdefault(parent, {})[linear] = name
    groups: list[tuple[str, ...]] = []
    for _, names in sorted(by_parent.items()):
        for qkv in STACKED:
            if set(qkv) <= set(names) and len({job.base[names[n]].shape[1] for n in qkv}) == 1:
                groups += [tuple(names.pop(linear) for linear in qkv)]
        groups += [(names[linear],) for linear in sorted(names)]
    return groups


def conv1d_names(model: Tensors) -> frozenset[str]:
    """Return the weights that a model stores as (d, o), as GPT-2's Conv1D, judged by biases."""
    names = [name for name in model if CONV1D.search(name)]
    for name in names:
        bias, shape = f"{name.removesuffix('weight')}bias", model[name].shape
        if bias in model and shape[0] != model[bias].shape[0] == shape[1]:
            return frozenset(names)
    return frozenset()


def stacked_vectors(
    job: MergeJob, names: Sequence[str], transposed: Collection[str]
) -> tuple[Tensor, list[Tensor], list[int]]:
    """Return stacked W₀ (Σo, d), experts' τ in float64, and each o; `transposed` are (d, o)."""
    stacked = []
    for name in names:
        base, experts = job.read(name)
        stacked.append([W.T if name in transposed else W for W in (base, *experts)])
    W0, *weights = (torch.cat(parts).double() for parts in zip(*stacked, strict=True))
    return W0, task_vectors(W0, weights), [len(base) for base, *_ in stacked]


def matrix_by_matrix(
    job: MergeJob, exclude: tuple[str, ...], rule: Callable[[Sequence[Tensor]], Tensor]
) -> NamedTensors:
    """Yield τ of every tensor: `rule` of a matrix's task vectors (o, d), float64; else the mean."""
    matrices, transposed = set(matrix_names(job, exclude)), conv1d_names(job.base)
    for number, name in enumerate(job.names, start=1):
        if name in matrices:
            tau = rule(stacked_vectors(job, [name], transposed)[1])
            yield name, tau.T if name in transposed else tau
        else:
            vectors = task_vectors(*job.read(name))
            yield name, tensor_sum(vectors) / len(vectors)
        job.progress(f"{number}/{len(job.names)}: {name}")
