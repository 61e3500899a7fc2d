"""Calibration batches as they are given: what must hold of each, and the name of the one a model
refuses.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from featcal.calibration.fingerprint import Digest
from featcal.calibration.spooled_list import SpooledList, leaves
from featcal.errors import BadBatches

Batch = Mapping[str, Any]

HELD_OUT = 8  # one sample in so many


class Stream:
    """The batches of one task, read once: digested, and kept where a model has several stacks, each
    of which starts from them.

    check: what is done with the first batch before it is used.
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
        """Of all batches, once they have been read."""
        return str(self._digest)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on a device; what is no mapping is left for `check_batch` to
    refuse.
    """
    if not isinstance(batch, Mapping):
        return batch
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def parted(task: str, batches: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Every batch without the samples held out, then those (True): the second of every eight that
    the task has, in its order.

    So small a part is enough to choose one or two numbers on. Raises: as `size`.
    """
    before = 0
    for number, batch in enumerate(batches):
        count = size(task, number, batch)
        held = (
            torch.arange(before, before + count) % HELD_OUT
        ) == 1  # not the first, so that one sample is one to solve with
        for apart, chosen in ((False, ~held), (True, held)):
            if chosen.any():
                yield rows(batch, chosen), apart
        before += count


def held_out(count: int) -> int:
    """How many of a task's samples `parted` holds out."""
    return (count + HELD_OUT - 2) // HELD_OUT


def size(task: str, number: int, batch: Batch) -> int:
    """Samples of a batch. Raises: BadBatches for one without a tensor."""
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
    """Some samples of a batch; what is no tensor with a row for every sample stays as it is."""
    return {
        name: value[chosen.to(value.device)]
        if isinstance(value, Tensor) and len(value) == len(chosen)
        else value
        for name, value in batch.items()
    }
