"""Arithmetic on one tensor of a base and its experts: task vectors, matrices, exact order statistics.

Sums run in float64: the mean of equal experts is that expert, bit for bit.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from featcal.merging.registry import MergeJob, NamedTensor
from featcal.merging.sources import is_vocabulary

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


def task_vector_sum(base: Tensor, experts: Sequence[Tensor]) -> Tensor:
    """Return Σ τᵢ in float64."""
    return tensor_sum(task_vectors(base, experts))


def add_task_vector(base: Tensor, vector: Tensor, scale: float) -> Tensor:
    """Return θ₀ + s τ, rounded once to the base's dtype."""
    return (base.double() + scale * vector).to(base.dtype)


def tensor_by_tensor(
    job: MergeJob, names: list[str], rule: Callable[[Tensor, list[Tensor]], Tensor]
) -> Iterator[NamedTensor]:
    """Yield `rule(base, experts)` of every named tensor."""
    for name in names:
        yield name, rule(*job.read(name))


# Entries of the whole model, a bounded number at a time


def pieces(base: Tensor, experts: Sequence[Tensor]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield the same entries of base and experts, flat."""
    flat = [torch.split(tensor.flatten(), PIECE) for tensor in (base, *experts)]
    for ours, *theirs in zip(*flat, strict=True):
        yield ours, theirs


def in_pieces(
    job: MergeJob, rule: Callable[[Tensor, list[Tensor]], Tensor]
) -> Iterator[NamedTensor]:
    """Yield `rule(base, experts)` of every tensor in float64, computed on flat pieces."""
    for name in job.names:
        base, experts = job.read(name)
        merged = torch.empty(base.numel(), dtype=torch.float64, device=base.device)
        parts = torch.split(merged, PIECE)
        for part, (ours, theirs) in zip(parts, pieces(base, experts), strict=True):
            part.copy_(rule(ours, theirs))
        yield name, merged.reshape(base.shape)


def magnitudes(job: MergeJob) -> Iterator[list[Tensor]]:
    """Yield |τᵢ| of every expert, piece by piece."""
    for name in job.names:
        for base, experts in pieces(*job.read(name)):
            yield [vector.abs() for vector in task_vectors(base, experts)]


# The k-th smallest of more values than fit in memory, exactly. Bits of a positive double order as
# the value does, so counting leading bits leaves few candidates.

BITS = 19  # of the 63 below the sign, counted per reading: 4 MiB of counters
CANDIDATES = 1 << 24  # few enough to sort: 128 MiB
Group = tuple[int, int, int]  # stream, known leading bits, how many are known


@dataclass
class RankSearch:
    """Search for the k-th smallest value of a stream among those that share its known bits."""

    stream: int
    k: int
    prefix: int = 0
    known: int = 0  # how many bits
    inside: int | None = None  # how many values share them

    @property
    def group(self) -> Group:
        """The values in which this search goes on."""
        return self.stream, self.prefix, self.known

    def narrow(self, counts: Tensor, width: int) -> None:
        """Take `width` more bits as known, from the counts of their values."""
        reached = counts.cumsum(0)
        bucket = int(torch.searchsorted(reached, self.k))
        self.k -= int(reached[bucket] - counts[bucket])
        self.prefix = (self.prefix << width) | bucket
        self.known, self.inside = self.known + width, int(counts[bucket])


def kth_smallest(
    read: Callable[[], Iterator[Sequence[Tensor]]], wanted: Sequence[tuple[int, int]]
) -> list[float]:
    """Return the k-th smallest value (from 1; 0 for k = 0) of a stream for every (stream, k).

    read: called for each pass over the data (two, unless many values share their first bits); it
          yields the next values of every stream: flat, float64, finite, ≥ 0.
    """
    searches = [RankSearch(stream, k) for stream, k in wanted]
    most = CANDIDATES // max(1, len(searches))
    while wide := [
        s for s in searches if s.k and s.known < 63 and (s.inside is None or s.inside > most)
    ]:
        widths = {s.group: min(BITS, 63 - s.known) for s in wide}
        counts = {
            group: torch.zeros(1 << width, dtype=torch.int64) for group, width in widths.items()
        }
        for values in read():
            for group, width in widths.items():
                bits = _bits(_in_group(values, group)) >> (63 - group[2] - width)
                own = torch.bincount(bits & ((1 << width) - 1), minlength=1 << width)
                counts[group] += own.cpu()
        for search in wide:
            search.narrow(counts[search.group], widths[search.group])
    candidates: dict[Group, list[Tensor]] = {s.group: [] for s in searches if s.k and s.known < 63}
    for values in read() if candidates else ():
        for group, parts in candidates.items():
            parts.append(_in_group(values, group))

    def result(search: RankSearch) -> float:
        if not search.k:
            return 0.0
        if search.known == 63:
            return float(torch.tensor(search.prefix, dtype=torch.int64).view(torch.float64))
        return float(torch.cat(candidates[search.group]).kthvalue(search.k).values)

    return [result(search) for search in searches]


def _bits(values: Tensor) -> Tensor:
    """Return the bits of values ≥ 0 as integers; −0.0 becomes 0.0, whose sign bit is not set."""
    return (values + 0.0).view(torch.int64)


def _in_group(values: Sequence[Tensor], group: Group) -> Tensor:
    """Return the values of the group's stream whose first bits below the sign are the known ones."""
    stream, prefix, known = group
    own = values[stream]
    return own[(_bits(own) >> (63 - known)) == prefix] if known else own


# Matrices, recognised by names and shapes: no module is made for it


def matrix_groups(job: MergeJob, exclude: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return every tensor with two axes as its own group, as FusionBench does, except `exclude`."""
    two = (name for name in job.names if len(job.base.shape(name)) == 2)
    return [(name,) for name in two if not is_vocabulary(name, exclude)]


def linear_groups(job: MergeJob, exclude: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the linears of numbered blocks; q, k and v of one attention are one group."""
    linears = [
        name.removesuffix(".weight")
        for (name,) in matrix_groups(job, exclude)
        if re.search(r"\.\d+\..*\.weight$", name) and not name.endswith(POSITION_TABLE)
    ]
    by_parent: dict[str, dict[str, str]] = {}
    for path in sorted(linears, key=lambda path: (path.rpartition(".")[0], path)):
        parent, _, name = path.rpartition(".")
        by_parent.setdefault(parent, {})[name] = f"{path}.weight"
    groups: list[tuple[str, ...]] = []
    for own in by_parent.values():
        groups += [
            tuple(own.pop(name) for name in qkv)
            for qkv in STACKED
            if set(qkv) <= set(own) and len({job.base.shape(own[name])[1] for name in qkv}) == 1
        ]
        groups += [(name,) for name in own.values()]
    return groups


def conv1d_names(job: MergeJob) -> frozenset[str]:
    """Return the weights that the model stores as (d, o), as GPT-2's Conv1D does.

    GPT-BigCode gives linears the same names; biases show which of the two a model has.
    """
    named = [name for name in job.names if CONV1D.search(name)]
    for name in named:
        bias, shape = f"{name.removesuffix('weight')}bias", job.base.shape(name)
        if bias in job.base.names and shape[0] != job.base.shape(bias)[0] == shape[1]:
            return frozenset(named)
    return frozenset()


def matrix_by_matrix(
    job: MergeJob, exclude: tuple[str, ...], rule: Callable[[Sequence[Tensor]], Tensor]
) -> Iterator[NamedTensor]:
    """Yield τ of every tensor: `rule` of a matrix's task vectors (o, d) in float64, the mean of all
    others.
    """
    matrices, turned = {names[0] for names in matrix_groups(job, exclude)}, conv1d_names(job)
    for number, name in enumerate(job.names, start=1):
        vectors = task_vectors(*job.read(name))
        if name not in matrices:
            yield name, tensor_sum(vectors) / len(vectors)
        elif name in turned:
            yield name, rule([vector.T for vector in vectors]).T
        else:
            yield name, rule(vectors)
        job.progress(f"{number}/{len(job.names)}: {name}")
