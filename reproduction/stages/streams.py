"""The images or texts that a method sees of every task: a fixed draw, or of encoders a whole split
shuffled in every round.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from zlib import crc32

from reproduction.experiments.runs import TEXT_POOLS, Draw, Pool, Reading
from reproduction.stages.context import Context

if TYPE_CHECKING:  # a stage's own process only names what stands here; its workers load torch
    import numpy as np
    from torch import Tensor

Batch: TypeAlias = "dict[str, Tensor]"


class Samples(Protocol):
    """Images or texts, which become numbers when a batch of them is asked for."""

    def __len__(self) -> int: ...
    def batches(
        self, indices: "Sequence[int] | np.ndarray[Any, Any] | None", size: int
    ) -> Iterator[Batch]: ...
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
    """A whole split in batches; every iteration goes on with the same generator, so the next round
    has another order.
    """

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
    """A fixed draw in batches, the same in every iteration: samples become numbers batch by
    batch.
    """

    samples: Samples
    size: int

    def __iter__(self) -> Iterator[Batch]:
        return self.samples.batches(None, self.size)

    def by_number(self) -> Numbered:
        """All samples, in the order in which an iteration gives them."""
        import numpy as np

        return Numbered(self.samples, np.arange(len(self.samples)))


Change: TypeAlias = Callable[[str, Any], Any]


def projection_of(context: Context, role: str, pool: Pool) -> "Tensor | None":
    """The projection behind the encoders of a role, where they have one."""
    from safetensors.torch import load_file

    return (
        None
        if pool in TEXT_POOLS
        else load_file(context.layout.heads(role, pool)).get("visual_projection")
    )


def streams(
    context: Context, role: str, pool: Pool, draw: Draw, **more: Any
) -> dict[str, Iterable[Batch]]:
    """Batches of every task of the pool, labels unused; as `stream`."""
    return {
        task: stream(context, role, pool, task, draw, **more)
        for task in context.suite.tasks_of(role, pool)
    }


def stream(
    context: Context,
    role: str,
    pool: Pool,
    task: str,
    draw: Draw,
    seed: int | None = None,
    change: Change | None = None,
    reading: Reading | None = None,
) -> Iterable[Batch]:
    """Batches of one task, labels unused.

    The train draw of a seed is the one FeatCal calibrates on.  seed: another one than the draw's
    own.  change: makes other
    samples of an encoder's task; which of them are drawn stays the same.  reading: how a language
    model reads its texts.
    """
    seed = draw.seed if seed is None else seed
    if pool in TEXT_POOLS:
        from reproduction.prepare.texts import text_batches

        base, count = (
            context.layout.base(role, pool),
            10**9 if draw.samples is None else draw.samples,
        )
        return text_batches(
            base, context.layout.texts, task, count, seed, draw.batch, reading or Reading()
        )
    import numpy as np

    from featcal.data.batches import draw_indices
    from reproduction.prepare.sources import load_task

    samples = load_task(
        context.layout.data_of(role), task, draw.split, context.layout.base(role, pool)
    )
    samples = samples if change is None else change(task, samples)
    if draw.samples is None:
        order = np.random.default_rng([seed, crc32(task.encode()), crc32(b"stream")])
        return Shuffled(samples, draw.batch, order)
    return Drawn(
        samples.take(draw_indices(task, len(samples.labels), draw.samples, seed)), draw.batch
    )


def plan_of(context: Context, role: str, pool: Pool, reading: Reading | None) -> Any:
    """The plan whose sums count the tokens that `reading` says; None for the model's own."""
    if reading is None:
        return None
    from reproduction.prepare.texts import plan_of_reading

    return plan_of_reading(context.layout.base(role, pool), reading)
