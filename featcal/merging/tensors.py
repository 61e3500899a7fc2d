"""Arithmetic on one tensor of a base and its experts: task vectors, matrices, exact order statistics.

Sums run in float64: the mean of equal experts is that expert, bit for bit.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from featcal.merging.registry import Job, Named
from featcal.merging.sources import is_vocabulary

PIECE = 1 << 20  # entries processed at a time: few enough for a cache
STACKED = (("q_proj", "k_proj", "v_proj"), ("q", "k", "v"), ("query", "key", "value"))
NO_LINEAR = "relative_attention_bias.weight"  # T5 keeps this table of positions in its first block
CONV1D = re.compile(r"\.(c_attn|q_attn|c_proj|c_fc)\.weight$")


def task_vectors(base: Tensor, experts: Sequence[Tensor]) -> list[Tensor]:
    """τᵢ = θᵢ − θ₀ in float64, one per expert."""
    return [expert.double() - base.double() for expert in experts]


def added(tensors: Sequence[Tensor]) -> Tensor:
    """Σ over a sequence, in its order."""
    return sum(tensors[1:], tensors[0])


def average_tensor(base: Tensor, experts: Sequence[Tensor]) -> Tensor:
    """θ = (1/N) Σ θᵢ, in the base's shape and dtype."""
    return (added([expert.double() for expert in experts]) / len(experts)).to(base.dtype)


def total(base: Tensor, experts: Sequence[Tensor]) -> Tensor:
    """Σ τᵢ in float64."""
    found = base.double() * 0
    for vector in task_vectors(base, experts):
        found += vector
    return found


def moved_tensor(base: Tensor, vector: Tensor, scale: float) -> Tensor:
    """θ₀ + s τ, rounded once to the base's dtype."""
    return (base.double() + scale * vector).to(base.dtype)


def moved(job: Job, vectors: Iterable[Named], scale: float) -> Iterator[Named]:
    """Yield every tensor moved along its task vector: θ₀ + s τ."""
    for name, vector in vectors:
        yield name, moved_tensor(job.base.finite_tensor(name).to(vector.device), vector, scale)


def tensor_by_tensor(
    job: Job, names: list[str], merged: Callable[[Tensor, list[Tensor]], Tensor]
) -> Iterator[Named]:
    """Yield every named tensor by a function of the base's and the experts'."""
    for name in names:
        yield name, merged(*job.read(name))


# Entries of the whole model, a bounded number at a time


def pieces(base: Tensor, experts: Sequence[Tensor]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield the same entries of base and experts, flat."""
    flat = [torch.split(tensor.flatten(), PIECE) for tensor in (base, *experts)]
    for ours, *theirs in zip(*flat, strict=True):
        yield ours, theirs


def in_pieces(job: Job, merged: Callable[[Tensor, list[Tensor]], Tensor]) -> Iterator[Named]:
    """Yield every tensor in float64 by a function of flat pieces of base and experts."""
    for name in job.names:
        base, experts = job.read(name)
        found = torch.empty(base.numel(), dtype=torch.float64, device=base.device)
        parts = zip(torch.split(found, PIECE), pieces(base, experts), strict=True)
        for part, (ours, theirs) in parts:
            part.copy_(merged(ours, theirs))
        yield name, found.reshape(base.shape)


def magnitudes(job: Job) -> Iterator[list[Tensor]]:
    """Yield |τᵢ| of every expert, piece by piece."""
    for name in job.names:
        for base, experts in pieces(*job.read(name)):
            yield [vector.abs() for vector in task_vectors(base, experts)]


# The k-th smallest of more numbers than fit in memory, exactly. Bits of a positive double order as
# the number does, so counting leading bits tells which few candidates are left.

BITS = 19  # of the 63 below the sign, counted per reading: 4 MiB of counters
CANDIDATES = 1 << 24  # few enough to sort: 128 MiB


@dataclass
class Search:
    """One wanted number: the k-th smallest of a stream among those that share its known bits."""

    stream: int
    k: int
    prefix: int = 0
    known: int = 0  # how many bits
    inside: int | None = None  # how many numbers share them

    @property
    def group(self) -> tuple[int, int, int]:
        return self.stream, self.prefix, self.known

    def narrowed(self, counts: Tensor, width: int) -> None:
        """Take `width` more bits as known, from the counts of their values."""
        reached = counts.cumsum(0)
        bucket = int(torch.searchsorted(reached, self.k))
        self.k -= int(reached[bucket] - counts[bucket])
        self.prefix = (self.prefix << width) | bucket
        self.known, self.inside = self.known + width, int(counts[bucket])


def kth_smallest(
    read: Callable[[], Iterator[Sequence[Tensor]]], wanted: Sequence[tuple[int, int]]
) -> list[float]:
    """Return the k-th smallest (from 1; 0 for k = 0) of a stream for every (stream, k) of `wanted`.

    read: called for each pass over the data (two, unless many numbers share their first bits); it
          yields the next numbers of every stream: flat, float64, finite, ≥ 0.
    """
    searches = [Search(stream, k) for stream, k in wanted]
    most = CANDIDATES // max(1, len(searches))
    while wide := [
        s for s in searches if s.k and s.known < 63 and (s.inside is None or s.inside > most)
    ]:
        widths = {s.group: min(BITS, 63 - s.known) for s in wide}
        counts = {key: torch.zeros(1 << width, dtype=torch.int64) for key, width in widths.items()}
        for numbers in read():
            for (stream, prefix, known), width in widths.items():
                bits = _bits(_with_prefix(numbers[stream], prefix, known)) >> (63 - known - width)
                own = torch.bincount(bits & ((1 << width) - 1), minlength=1 << width)
                counts[stream, prefix, known] += own.cpu()
        for search in wide:
            search.narrowed(counts[search.group], widths[search.group])
    left: dict[tuple[int, int, int], list[Tensor]] = {
        s.group: [] for s in searches if s.k and s.known < 63
    }
    for numbers in read() if left else ():
        for (stream, prefix, known), parts in left.items():
            parts.append(_with_prefix(numbers[stream], prefix, known))
    found = []
    for search in searches:
        if not search.k:
            found.append(0.0)
        elif search.known == 63:
            found.append(float(torch.tensor(search.prefix, dtype=torch.int64).view(torch.float64)))
        else:
            found.append(float(torch.cat(left[search.group]).kthvalue(search.k).values))
    return found


def _bits(numbers: Tensor) -> Tensor:
    """Return the bits of numbers ≥ 0 as integers; −0.0 becomes 0.0, whose sign bit is not set."""
    return (numbers + 0.0).view(torch.int64)


def _with_prefix(numbers: Tensor, prefix: int, known: int) -> Tensor:
    """Return the numbers whose first bits below the sign are the known ones."""
    return numbers if known == 0 else numbers[(_bits(numbers) >> (63 - known)) == prefix]


# Matrices, recognised by names and shapes: no module is made for it


def matrix_groups(job: Job, exclude: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return every tensor with two axes as its own group, as FusionBench does, except `exclude`."""
    two = (name for name in job.names if len(job.base.shape(name)) == 2)
    return [(name,) for name in two if not is_vocabulary(name, exclude)]


def linear_groups(job: Job, exclude: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the linears of numbered blocks; q, k and v of one attention are one group."""
    names = [group[0] for group in matrix_groups(job, exclude)]
    inside = [name for name in names if re.search(r"\.\d+\..*\.weight$", name)]
    linears = sorted(
        (name for name in inside if not name.endswith(NO_LINEAR)), key=lambda n: (_parent(n), n)
    )
    groups: list[tuple[str, ...]] = []
    for _, members in groupby(linears, key=_parent):
        paths = (name.removesuffix(".weight") for name in members)
        own = {path.rpartition(".")[2]: path for path in paths}
        for words in STACKED:
            if (
                set(words) <= set(own)
                and len({job.base.shape(f"{own[word]}.weight")[1] for word in words}) == 1
            ):
                groups.append(tuple(f"{own.pop(word)}.weight" for word in words))
        groups += [(f"{path}.weight",) for path in own.values()]
    return groups


def _parent(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[0]


def conv1d_names(job: Job) -> frozenset[str]:
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
    job: Job, exclude: tuple[str, ...], merged: Callable[[Sequence[Tensor]], Tensor]
) -> Iterator[Named]:
    """Yield τ of every tensor: of a matrix `merged` of its task vectors (o, d) in float64, of any
    other tensor their mean.
    """
    matrices, turned = {names[0] for names in matrix_groups(job, exclude)}, conv1d_names(job)
    for number, name in enumerate(job.names, start=1):
        vectors = task_vectors(*job.read(name))
        if name in matrices:
            upright = [vector.T if name in turned else vector for vector in vectors]
            tau = merged(upright)
            yield name, tau.T if name in turned else tau
        else:
            yield name, added(vectors) / len(vectors)
        job.progress(f"{number}/{len(job.names)}: {name}")
