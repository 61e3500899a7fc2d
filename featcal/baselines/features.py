"""Features as a model's head receives them, and the batches of features each training step sees.

n samples · rows of all samples concatenated · d width of a feature. An image has one row, a text
one for every token.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from featcal.baselines.settings import Training
from featcal.core.draws import generator
from featcal.errors import BadBatches
from featcal.models.batch import (
    IGNORED,
    Batch,
    Batches,
    naming,
    single_samples,
)
from featcal.models.features import Head, rows_before_head
from featcal.models.load import evaluation_mode


@dataclass(frozen=True)
class Pair:
    """Features of the same samples by two models.

    merged, expert: (rows, d).   sizes: rows of every sample, (n,).
    """

    merged: Tensor
    expert: Tensor
    sizes: Tensor

    def of(self, samples: Tensor) -> "Pair":
        """Return the samples with these indices, in this order."""
        if len(self.sizes) == len(self.merged):  # images
            rows = samples
        else:
            ends = self.sizes.cumsum(0)
            spans = zip((ends - self.sizes)[samples].tolist(), ends[samples].tolist(), strict=True)
            rows = torch.cat([torch.arange(start, end) for start, end in spans])
        rows = rows.to(self.merged.device)
        return Pair(self.merged[rows], self.expert[rows], self.sizes[samples])


def pairs_of_several(
    task: str,
    merged: Mapping[str, nn.Module],
    expert: nn.Module | Tensor,
    batches: Batches,
    head: Head,
) -> dict[str, Pair]:
    """Compute features of all batches of one task by each merged model and the one expert, frozen
    and without dropout; return them by the merged model's name.

    expert: a model, or its features (rows, d).   head: as for `surgery`.
    Raises: BadBatches for no batch, or for one that a model refuses; BadSetting for a head that
    does not fit.
    """
    ours: dict[str, list[Tensor]] = {name: [] for name in merged}
    theirs, sizes = [], []
    with evaluation_mode([*merged.values(), *([expert] if isinstance(expert, nn.Module) else [])]):
        for number, batch in enumerate(batches):
            with naming(task, number):
                for name, model in merged.items():
                    rows, counts = rows_before_head(model, batch, head)
                    ours[name].append(rows)
                if isinstance(expert, nn.Module):
                    theirs.append(rows_before_head(expert, batch, head)[0].to(rows.device))
                sizes.append(counts)  # tokens without padding, the same for every model
    if not sizes:
        raise BadBatches(task, "is empty; an adapter needs at least one batch")
    shared = torch.cat(theirs) if isinstance(expert, nn.Module) else expert.to(rows.device)
    all_sizes = torch.cat(sizes)
    return {name: Pair(torch.cat(own), shared, all_sizes) for name, own in ours.items()}


# the batches of each training step

Step = Mapping[str, Pair]


class Samples(Protocol):
    """All samples of one task by index; batches of them are made on demand."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return these samples as one batch."""
        ...


@dataclass(frozen=True)
class InMemorySamples:
    """Samples in memory, each a batch of one."""

    task: str
    singles: Sequence[Batch]

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.singles)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return these samples as one batch."""
        return together(self.task, [self.singles[i] for i in indices])


def kept_steps(pairs: Mapping[str, Pair], settings: Training, seed: int) -> Iterator[Step]:
    """Yield batches of features that were computed once."""
    orders = {
        task: batch_order(task, len(pair.sizes), settings, seed) for task, pair in pairs.items()
    }
    while True:
        yield {task: pair.of(next(orders[task])) for task, pair in pairs.items()}


def encoded_steps(
    merged: nn.Module,
    experts: Mapping[str, nn.Module],
    batches: Mapping[str, Batches],
    head: Head,
    settings: Training,
    seed: int,
) -> Iterator[Step]:
    """Yield the same batches, running both models for each, as published. All experts stay in
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
            with torch.no_grad(), naming(task, 0):
                ours, sizes = rows_before_head(merged, batch, head)
                theirs = rows_before_head(expert, batch, head)[0].to(ours.device)
            step[task] = Pair(ours, theirs, sizes)
        yield step


def samples_of(task: str, batches: Batches) -> Samples:
    """Return the samples that batches offer `by_number` (whole image splits do), or read them all.

    Raises: BadBatches for no sample.
    """
    by_number = getattr(batches, "by_number", None)
    samples: Samples = by_number() if by_number else InMemorySamples(task, single_samples(batches))
    if not len(samples):
        raise BadBatches(task, "is empty; an adapter needs at least one sample")
    return samples


def together(task: str, samples: Sequence[Batch]) -> Batch:
    """Return one batch of several samples; shorter texts are padded at the end."""
    batch = {}
    for name, first in samples[0].items():
        batch[name] = first
        if not isinstance(first, Tensor):
            continue
        values = [sample[name] for sample in samples]
        lengths = [value.shape[-1] for value in values]
        length = max(lengths)
        if name == "input_ids" and length > min(lengths) and "attention_mask" not in samples[0]:
            raise BadBatches(task, "texts differ in length; give an attention_mask with them")
        fill = IGNORED if name == "labels" else 0
        batch[name] = torch.cat(
            [pad(v, (0, length - v.shape[-1]), value=fill) if v.dim() == 2 else v for v in values]
        )
    return batch


def batch_order(task: str, count: int, settings: Training, seed: int) -> Iterator[Tensor]:
    """Yield the indices (n,) of the samples of each step, without end.

    n = settings.batch, or fewer for the last step of a shuffle.
    """
    draws = generator(task, "batches", seed)
    while True:
        shuffled = torch.randperm(count, generator=draws)
        yield from shuffled.split(settings.batch)[: settings.reshuffle]
