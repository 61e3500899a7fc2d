"""Calibration batches: read once, digested, moved to a device, and cut by samples."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from featcal.calibration.fingerprint import Digest
from featcal.calibration.spooled_list import SpooledList, leaves
from featcal.errors import BadBatches

Batch = Mapping[str, Any]


class Stream:
    """The batches of one task, read once and digested; kept for models with several stacks.

    check: called with the first batch before it is used.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        kept: SpooledList | None,
        check: Callable[[Batch], None] | None,
    ):
        self._batches, self._kept, self._check = batches, kept, check
        self._digest = Digest()

    def __iter__(self) -> Iterator[Batch]:
        if self._kept is not None and len(self._kept):
            yield from self._kept
            return
        for number, batch in enumerate(self._batches):
            if isinstance(batch, Mapping):
                self._digest.add(*batch, *leaves(dict(batch), Tensor))
            if number == 0 and self._check:
                self._check(batch)
            if self._kept is not None:
                self._kept.append(batch)
            yield batch

    @property
    def digest(self) -> str:
        """Return the digest of all batches, once they have been read."""
        return str(self._digest)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Move the tensors of a batch to a device; leave what is no mapping for `check_batch` to
    refuse.
    """
    if not isinstance(batch, Mapping):
        return batch
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def size(task: str, number: int, batch: Batch) -> int:
    """Return the number of samples of a batch. Raises: BadBatches for one without a tensor."""
    tensors = (
        [value for value in batch.values() if isinstance(value, Tensor)]
        if isinstance(batch, Mapping)
        else []
    )
    if not tensors:
        raise BadBatches(
            task,
            f"batch {number} holds no tensor; expected a mapping such as {{'pixel_values': tensor}}",
        )
    return len(tensors[0])


def rows(batch: Batch, chosen: Tensor) -> Batch:
    """Return some samples of a batch; values that are no tensor with one row per sample stay."""
    return {
        name: value[chosen.to(value.device)]
        if isinstance(value, Tensor) and len(value) == len(chosen)
        else value
        for name, value in batch.items()
    }
