"""Calibration batches as they are given: what must hold of each, and the name of the one a model refuses."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from featcal.calibration.fingerprint import Digest
from featcal.calibration.waiting import Waiting, found
from featcal.errors import BadBatches

Batch = Mapping[str, Any]


class Stream:
    """The batches of one task, read once: digested, and kept where a model has several stacks, each of which starts from them.

    check: what is done with the first batch before it is used.
    """

    def __init__(self, batches: Iterable[Batch], kept: Waiting | None, check: Callable[[Batch], None] | None):
        self._batches, self._kept, self._check = batches, kept, check
        self._digest = Digest()

    def __iter__(self) -> Iterator[Batch]:
        if self._kept is not None and len(self._kept):
            yield from self._kept
            return
        for number, batch in enumerate(self._batches):
            if isinstance(batch, Mapping):
                self._digest.add(*batch, *found(dict(batch), Tensor))
            if number == 0 and self._check:
                self._check(batch)
            if self._kept is not None:
                self._kept.append(batch)
            yield batch

    @property
    def digest(self) -> str:
        """Of all batches, once they have been read."""
        return str(self._digest)


def check_batch(task: str, number: int, batch: object, model: nn.Module) -> None:
    """Raise BadBatches unless the batch is a mapping with the model's main input whose numbers are finite."""
    if not isinstance(batch, Mapping):
        kind = type(batch).__name__
        raise BadBatches(task, f"batch {number} is a {kind}; expected a mapping such as {{'pixel_values': tensor}}")
    main = getattr(model, "main_input_name", None)  # of transformers' models; others are asked nothing
    if main not in batch and main is not None:
        raise BadBatches(task, f"batch {number} has no {main!r} (it holds: {', '.join(map(str, batch)) or 'nothing'})")
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.numel() == 0:
            raise BadBatches(task, f"{name!r} of batch {number} is empty; leave the batch out")
        if isinstance(value, Tensor) and value.is_floating_point() and not torch.isfinite(value).all():
            raise BadBatches(task, f"{name!r} of batch {number} holds NaN or Inf; repair or leave out the sample")


@contextmanager
def naming(task: str, number: int) -> Iterator[None]:
    """Turns a model's refusal of a batch (an unknown keyword, another image size, no image at all) into BadBatches."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise BadBatches(task, f"batch {number} is refused by the model ({error})") from error


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on a device; what is no mapping is left for `check_batch` to refuse."""
    if not isinstance(batch, Mapping):
        return batch
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
