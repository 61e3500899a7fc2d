"""The k-th smallest of more numbers than fit in memory, exactly, of several streams of numbers that
are read side by side.

Bits of a positive double order as the number does, so counting leading bits tells which few
candidates are left.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BITS = 19  # of the 63 below the sign, counted per reading: 4 MiB of counters
CANDIDATES = 1 << 24  # few enough to sort: 128 MiB

Pieces = Callable[
    [], Iterator[Sequence[Tensor]]
]  # of every stream the next numbers, flat, float64, ≥ 0 and finite


@dataclass
class Search:
    """One wanted number: of which stream, the how many smallest among those that share its leading
    bits, and these bits.
    """

    stream: int
    k: int
    prefix: int = 0
    known: int = 0  # how many bits
    inside: int | None = None  # how many numbers share them

    @property
    def group(self) -> tuple[int, int, int]:
        """The numbers that are left."""
        return self.stream, self.prefix, self.known

    def narrowed(self, counts: Tensor, width: int) -> None:
        """So many bits more are known, once it is counted how often each follows."""
        reached = counts.cumsum(0)
        bucket = int(torch.searchsorted(reached, self.k))
        self.k -= int(reached[bucket] - counts[bucket])
        self.prefix, self.known, self.inside = (
            (self.prefix << width) | bucket,
            self.known + width,
            int(counts[bucket]),
        )


def kth_smallest(pieces: Pieces, wanted: Sequence[tuple[int, int]]) -> list[float]:
    """For every (stream, k) of `wanted` the k-th smallest, from 1, of all numbers of that stream; 0
    for k = 0.

    pieces: called for each reading (two, unless many numbers agree in their first bits).
    """
    searches = [Search(stream, k) for stream, k in wanted]
    most = CANDIDATES // max(1, len(searches))
    while wide := [
        s for s in searches if s.k and s.known < 63 and (s.inside is None or s.inside > most)
    ]:
        widths = {s.group: min(BITS, 63 - s.known) for s in wide}
        counts = {
            group: torch.zeros(1 << width, dtype=torch.int64) for group, width in widths.items()
        }
        for numbers in pieces():
            for (stream, prefix, known), width in widths.items():
                bits = _with_prefix(numbers[stream], prefix, known).view(torch.int64) >> (
                    63 - known - width
                )
                own = torch.bincount(bits & ((1 << width) - 1), minlength=1 << width)
                counts[stream, prefix, known] += own.cpu()
        for search in wide:
            search.narrowed(counts[search.group], widths[search.group])
    left: dict[tuple[int, int, int], list[Tensor]] = {
        s.group: [] for s in searches if s.k and s.known < 63
    }
    for numbers in pieces() if left else ():
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


def _with_prefix(piece: Tensor, prefix: int, known: int) -> Tensor:
    """The numbers of a piece whose first bits below the sign are the known ones."""
    return piece if known == 0 else piece[(piece.view(torch.int64) >> (63 - known)) == prefix]
