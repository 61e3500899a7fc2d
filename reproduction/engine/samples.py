"""The samples that methods see and that models are scored on."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from featcal.data.batches import draw_indices
from featcal.data.images import ImageSet
from featcal.models.batch import Batch
from reproduction.engine.context import Setup
from reproduction.engine.spec import ModelSpec
from reproduction.experiments import Reading, SampleDraw
from reproduction.prepare import damage as corruptions
from reproduction.prepare.sources import load_task
from reproduction.prepare.texts import plan_of_reading, text_batches
from reproduction.results import packed


@dataclass(frozen=True)
class Numbered:
    """Samples by their position in an order, (n,)."""

    samples: Any
    order: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.order)

    def batch(self, indices: Sequence[int]) -> Batch:
        return next(iter(self.samples.batches(self.order[indices], len(indices))))


@dataclass(frozen=True)
class SampleStream:
    """Batches of images or texts. shuffle: a generator that every iteration continues."""

    samples: Any
    size: int
    shuffle: np.random.Generator | None = None

    def by_number(self) -> Numbered:
        """Return all samples in the order of the next iteration."""
        count = len(self.samples)
        order = self.shuffle.permutation(count) if self.shuffle else np.arange(count)
        return Numbered(self.samples, order)

    def __iter__(self) -> Iterator[Batch]:
        batches: Iterator[Batch] = self.samples.batches(self.by_number().order, self.size)
        return batches


def load_split(setup: Setup, task: str, split: str) -> Any:
    samples = load_task(setup.data, task, split, setup.base)
    return setup.change(task, samples) if setup.change else samples


def streams(
    setup: Setup, draw: SampleDraw, reading: Reading | None = None
) -> dict[str, Iterable[Batch]]:
    """Return batches of every task of the pool, labels unused; as `stream`."""
    return {task: stream(setup, task, draw, reading) for task in setup.tasks}


def stream(
    setup: Setup, task: str, draw: SampleDraw, reading: Reading | None = None
) -> Iterable[Batch]:
    """Return batches of one task, labels unused."""
    if setup.of_texts:
        count = 10**9 if draw.samples is None else draw.samples
        arguments = (count, draw.seed, draw.batch, reading or Reading())
        return text_batches(setup.base, setup.texts, task, *arguments)
    samples = load_split(setup, task, draw.split)
    if draw.samples is None:
        order = np.random.default_rng([draw.seed, crc32(task.encode()), crc32(b"stream")])
        return SampleStream(samples, draw.batch, order)
    indices = draw_indices(task, len(samples.labels), draw.samples, draw.seed)
    return SampleStream(samples.take(indices), draw.batch)


def damaged(task: str, samples: Any, damage: str, seed: int) -> Any:
    """Return images under a corruption, or texts under a damage whose strength ends its name."""
    name, _, strength = damage.partition("-")
    if strength:
        return corruptions.damaged(samples, task, name, int(strength), seed)
    return corruptions.corrupted(samples, task, name, seed)


def plan_of(setup: Setup, reading: Reading | None) -> Any:
    """Return the plan whose sums count the tokens that `reading` names; None: the model's own."""
    return None if reading is None else plan_of_reading(setup.base, reading)


def draw_at_most(limit: int | None, task: str, count: int, seed: int) -> NDArray[np.int64]:
    """Return a draw of at most `limit` of `count` samples; of all without a limit."""
    return draw_indices(task, count, min(limit or count, count), seed)


@dataclass(frozen=True)
class Selection:
    """Samples of an encoder's tasks that are scored. limit, seed: draw some, in their order."""

    split: str = "test"
    limit: int | None = None
    seed: int = 0

    def read(self, setup: Setup, task: str) -> Any:
        """Return the samples of one task, on the device where the suite computes."""
        samples = load_split(setup, task, self.split)
        if self.limit is not None:
            indices = draw_at_most(self.limit, task, len(samples.labels), self.seed)
            samples = samples.take(sorted(indices.tolist()))
        on_device = isinstance(samples, ImageSet)
        return replace(samples, device=setup.context.device) if on_device else samples


def seen_rows(
    setup: Setup, models: Iterable[ModelSpec], scores: Iterable[Any]
) -> list[dict[str, Any]]:
    """Return a row per task and draw of test samples. scores: rows with each task's number of them."""
    counts = {row["task"]: int(row["count"]) for row in scores}
    draws = (model.draw for model in models if model.draw)
    tests = dict.fromkeys((d.stream, d.samples, d.seed) for d in draws if d.split == "test")
    rows = []
    for (stream, samples, seed), (task, count) in product(tests, counts.items()):
        indices = set(draw_at_most(samples, task, count, seed).tolist())
        flags = packed(i in indices for i in range(count))
        columns = {"task": task, "stream": stream, "samples": samples, "seed": seed}
        rows.append(setup.row_keys | columns | {"count": count, "seen": flags})
    return rows
