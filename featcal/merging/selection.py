"""The k-th smallest of more numbers than fit in memory, exactly.

Bits of a positive double order as the number does, so counting leading bits tells which few candidates are left.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

BITS = 19  # of the 63 below the sign, counted per reading: 4 MiB of counters
CANDIDATES = 1 << 24  # few enough to sort: 128 MiB


def kth_smallest(pieces: Callable[[], Iterator[Tensor]], k: int) -> float:
    """The k-th smallest, from 1, of the numbers ≥ 0 in all pieces together; 0 for k = 0.

    pieces: called for each reading (two, unless many numbers agree in their first bits); float64, flat, finite.
    """
    if k == 0:
        return 0.0
    prefix, known, inside = 0, 0, None  # the wanted number's leading bits, how many are known, how many numbers have them
    while known < 63 and (inside is None or inside > CANDIDATES):
        width = min(BITS, 63 - known)
        counts = torch.zeros(1 << width, dtype=torch.int64)
        for piece in pieces():
            bits = _with_prefix(piece, prefix, known).view(torch.int64) >> (63 - known - width)
            counts += torch.bincount(bits & ((1 << width) - 1), minlength=1 << width).cpu()
        reached = counts.cumsum(0)
        bucket = int(torch.searchsorted(reached, k))
        k -= int(reached[bucket] - counts[bucket])
        prefix, known, inside = (prefix << width) | bucket, known + width, int(counts[bucket])
    if known == 63:
        return float(torch.tensor(prefix, dtype=torch.int64).view(torch.float64))
    return float(torch.cat([_with_prefix(piece, prefix, known) for piece in pieces()]).kthvalue(k).values)


def _with_prefix(piece: Tensor, prefix: int, known: int) -> Tensor:
    """The numbers of a piece whose first bits below the sign are the known ones."""
    return piece if known == 0 else piece[(piece.view(torch.int64) >> (63 - known)) == prefix]
