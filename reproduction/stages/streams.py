"""The images or texts that a merger or an adapter sees of every task: a fixed draw, or a whole split shuffled in every round."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from zlib import crc32

from reproduction.experiments.runs import Draw, Pool
from reproduction.stages.context import Context

if TYPE_CHECKING:  # a stage's own process only names what stands here; its workers load torch
    import numpy as np
    from torch import Tensor

Batch: TypeAlias = "dict[str, Tensor]"


class Samples(Protocol):
    """Images or texts, which become numbers when a batch of them is asked for."""

    def __len__(self) -> int: ...
    def batches(self, indices: "Sequence[int] | np.ndarray[Any, Any] | None", size: int) -> Iterator[Batch]: ...
    def take(self, indices: "Sequence[int] | np.ndarray[Any, Any]") -> "Samples": ...


@dataclass(frozen=True)
class Numbered:
    """Samples by their place in an order."""

    samples: Samples
    order: "np.ndarray[Any, np.dtype[np.int64]]"

    def __len__(self) -> int:
        return len(self.order)

    def batch(self, indices: Sequence[int]) -> Batch:
        return next(iter(self.samples.batches(self.order[indices], len(indices))))


@dataclass(frozen=True)
class Shuffled:
    """A whole split in batches; every iteration goes on with the same generator, so the next round has another order."""

    samples: Samples
    size: int
    order: "np.random.Generator"

    def __iter__(self) -> Iterator[Batch]:
        return self.samples.batches(self.order.permutation(len(self.samples)), self.size)

    def by_number(self) -> Numbered:
        """All samples, in the order in which an iteration would give them."""
        return Numbered(self.samples, self.order.permutation(len(self.samples)))


@dataclass(frozen=True)
class Drawn:
    """A fixed draw in batches, the same in every iteration: samples become numbers batch by batch."""

    samples: Samples
    size: int

    def __iter__(self) -> Iterator[Batch]:
        return self.samples.batches(None, self.size)

    def by_number(self) -> Numbered:
        """All samples, in the order in which an iteration gives them."""
        import numpy as np

        return Numbered(self.samples, np.arange(len(self.samples)))


Change: TypeAlias = Callable[[str, Any], Any]


def samples_of(context: Context, role: str, pool: Pool) -> "tuple[Tensor | None, Callable[[str, Draw, int], Iterable[Batch]]]":
    """The projection behind the encoders of a role, where they have one, and the batches of a task for a draw and seed."""
    from safetensors.torch import load_file

    return load_file(context.layout.heads(role, pool)).get("visual_projection"), partial(stream, context, role, pool)


def streams(
    context: Context, role: str, pool: Pool, draw: Draw, seed: int | None = None, change: Change | None = None
) -> dict[str, Iterable[Batch]]:
    """Batches of every task of the pool, labels unused; as `stream`."""
    return {task: stream(context, role, pool, task, draw, seed, change) for task in context.suite.tasks_of(role, pool)}


def stream(
    context: Context, role: str, pool: Pool, task: str, draw: Draw, seed: int | None = None, change: Change | None = None
) -> Iterable[Batch]:
    """Batches of one task, labels unused.

    The train draw of a seed is the one FeatCal calibrates on.  seed: another one than the draw's own.  change: makes other
    samples of a task's; which of them are drawn stays the same.
    """
    import numpy as np

    from featcal.data.sampling import draw_indices
    from reproduction.suites.load_task import load_task

    seed = draw.seed if seed is None else seed
    samples = load_task(context.layout.data_of(role), task, draw.split, context.layout.base(role, pool))
    samples = samples if change is None else change(task, samples)
    if draw.samples is None:
        order = np.random.default_rng([seed, crc32(task.encode()), crc32(b"stream")])
        return Shuffled(samples, draw.batch, order)
    return Drawn(samples.take(draw_indices(task, len(samples.labels), draw.samples, seed)), draw.batch)
