"""Part of every task's samples is held out: no calibration sees it, and candidates are told apart
on it.

Drawn sample by sample, as batches are often sorted by length, and by a generator of its own for
every task.
"""

from collections.abc import Iterable, Mapping
from zlib import crc32

import numpy as np
import torch

from featcal.calibration.batches import Batch, rows, size
from featcal.errors import BadBatches

Split = tuple[dict[str, list[Batch]], dict[str, list[Batch]]]  # kept and held out, by task


def split_all(batches: Mapping[str, Iterable[Batch]], share: float, seed: int) -> Split:
    """The batches of every task without the samples held out, and those samples in batches of their
    own.
    """
    parts = {task: split(task, batches[task], share, seed) for task in sorted(batches)}
    return {task: kept for task, (kept, _) in parts.items()}, {
        task: held for task, (_, held) in parts.items()
    }


def split(
    task: str, batches: Iterable[Batch], share: float, seed: int
) -> tuple[list[Batch], list[Batch]]:
    """One task; at least one sample on either side. Raises: BadBatches for fewer than two samples,
    or for no mapping.
    """
    read = list(batches)
    sizes = [size(task, number, batch) for number, batch in enumerate(read)]
    count = sum(sizes)
    if count < 2:
        raise BadBatches(
            task, f"has {count} sample{'s' * (count != 1)}; two are needed, as one is held out"
        )
    wanted = min(max(1, round(share * count)), count - 1)
    generator = np.random.default_rng([seed, crc32(task.encode()), crc32(b"holdout")])
    apart = torch.zeros(count, dtype=torch.bool)
    apart[torch.from_numpy(generator.permutation(count)[:wanted])] = True
    kept, held = [], []
    for batch, own in zip(read, apart.split(sizes), strict=True):
        kept += [rows(batch, ~own)] if not own.all() else []
        held += [rows(batch, own)] if own.any() else []
    return kept, held
