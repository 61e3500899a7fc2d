"""What each training step sees: a batch of features of every task, drawn from kept features or
computed anew.

An iterable of {task: Pair}, without end; training takes as many as it makes steps.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from featcal.blocks.batches import IGNORED, single_samples
from featcal.errors import BadBatches
from featcal.rivals.draws import batch_order
from featcal.rivals.features import Batch, Head, Pair, frozen_features
from featcal.rivals.settings import Training

Step = Mapping[str, Pair]


class Samples(Protocol):
    """All samples of one task by number: a batch of them is made when it is asked for."""

    def __len__(self) -> int: ...
    def batch(self, indices: Sequence[int]) -> Batch: ...


@dataclass(frozen=True)
class Held:
    """Samples in memory, each a batch of one."""

    task: str
    singles: Sequence[Batch]

    def __len__(self) -> int:
        return len(self.singles)

    def batch(self, indices: Sequence[int]) -> Batch:
        return together(self.task, [self.singles[i] for i in indices])


def kept_steps(pairs: Mapping[str, Pair], settings: Training, seed: int) -> Iterator[Step]:
    """Batches of features that were computed once."""
    orders = {
        task: batch_order(task, len(pair.sizes), settings, seed) for task, pair in pairs.items()
    }
    while True:
        yield {task: pair.of(next(orders[task])) for task, pair in pairs.items()}


def encoded_steps(
    merged: nn.Module,
    experts: Mapping[str, nn.Module],
    batches: Mapping[str, Iterable[Batch]],
    head: Head,
    settings: Training,
    seed: int,
) -> Iterator[Step]:
    """The same batches, both models run for every one of them, as published; all experts stay in
    memory, in evaluation mode.

    Raises: BadBatches for a task without samples, or texts of several lengths without an attention
    mask.
    """
    samples = {task: samples_of(task, batches[task]) for task in experts}
    orders = {task: batch_order(task, len(samples[task]), settings, seed) for task in experts}
    while True:
        step = {}
        for task, expert in experts.items():
            batch = samples[task].batch(next(orders[task]).tolist())
            step[task] = frozen_features(task, {"": merged}, expert, [batch], head)[""]
        yield step


def samples_of(task: str, batches: Iterable[Batch]) -> Samples:
    """Those that the batches offer `by_number`, as images of a whole split do, which are many;
    others are held as they come.

    Raises: BadBatches without any.
    """
    by_number = getattr(batches, "by_number", None)
    found: Samples = by_number() if by_number else Held(task, single_samples(batches))
    if not len(found):
        raise BadBatches(task, "is empty; an adapter needs at least one sample")
    return found


def together(task: str, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One batch of several samples; shorter texts are padded behind."""
    batch = {}
    for name, first in samples[0].items():
        batch[name] = first
        if isinstance(first, Tensor):
            values = [sample[name] for sample in samples]
            length = max(value.shape[-1] for value in values)
            if (
                name == "input_ids"
                and length > min(value.shape[-1] for value in values)
                and "attention_mask" not in samples[0]
            ):
                raise BadBatches(task, "texts differ in length; give an attention_mask with them")
            fill = IGNORED if name == "labels" else 0
            batch[name] = torch.cat(
                [
                    pad(v, (0, length - v.shape[-1]), value=fill) if v.dim() == 2 else v
                    for v in values
                ]
            )
    return batch
