"""The images that a merger or an adapter sees of every task: a fixed draw, or the whole split shuffled in every round."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias
from zlib import crc32

from reproduction.experiments.runs import Draw, Pool
from reproduction.stages.context import Context

if TYPE_CHECKING:  # a stage's own process only names what stands here; its workers load torch
    import numpy as np
    from torch import Tensor

    from featcal.data.images import ImageSet, Pictures

Batch: TypeAlias = "dict[str, Tensor]"


@dataclass(frozen=True)
class Numbered:
    """Pictures by their place in an order; they become numbers when a batch of them is asked for."""

    pictures: "Pictures"
    order: "np.ndarray[Any, np.dtype[np.int64]]"

    def __len__(self) -> int:
        return len(self.order)

    def batch(self, indices: Sequence[int]) -> Batch:
        return {"pixel_values": self.pictures.tensor(self.order[indices])}


@dataclass(frozen=True)
class Shuffled:
    """A whole split in batches; every iteration goes on with the same generator, so the next round has another order."""

    images: "ImageSet"
    size: int
    order: "np.random.Generator"

    def __iter__(self) -> Iterator[Batch]:
        return self.images.batches(self.order.permutation(len(self.images)), self.size)

    def by_number(self) -> Numbered:
        """All pictures, in the order in which an iteration would give them."""
        return Numbered(self.images, self.order.permutation(len(self.images)))


@dataclass(frozen=True)
class Drawn:
    """A fixed draw in batches, the same in every iteration: pictures are held as bytes and become numbers batch by batch."""

    pictures: "Pictures"
    size: int

    def __iter__(self) -> Iterator[Batch]:
        return self.pictures.batches(None, self.size)

    def by_number(self) -> Numbered:
        """All pictures, in the order in which an iteration gives them."""
        import numpy as np

        return Numbered(self.pictures, np.arange(len(self.pictures)))


Change: TypeAlias = "Callable[[str, ImageSet], ImageSet]"


def images_of(context: Context, role: str, pool: Pool) -> "tuple[Tensor, Callable[[str, Draw, int], Iterable[Batch]]]":
    """The projection behind the vision models of a role, and the batches of a task for a draw and seed."""
    from safetensors.torch import load_file

    return load_file(context.layout.heads(role, pool))["visual_projection"], partial(stream, context, role, pool)


def streams(
    context: Context, role: str, pool: Pool, draw: Draw, seed: int | None = None, change: "Change | None" = None
) -> dict[str, Iterable[Batch]]:
    """Batches of every task of the pool, labels unused; as `stream`."""
    return {task: stream(context, role, pool, task, draw, seed, change) for task in context.suite.tasks_of(role, pool)}


def stream(
    context: Context, role: str, pool: Pool, task: str, draw: Draw, seed: int | None = None, change: "Change | None" = None
) -> Iterable[Batch]:
    """Batches of one task, labels unused.

    The train draw of a seed is the one FeatCal calibrates on.  seed: another one than the draw's own.  change: makes other
    images of a task's; which of them are drawn stays the same.
    """
    import numpy as np

    from featcal.data.images import Pictures
    from featcal.data.sampling import draw_indices
    from reproduction.suites.load_task import load_task

    seed = draw.seed if seed is None else seed
    images = load_task(context.layout.data, task, draw.split, context.layout.base(role, pool))
    images = images if change is None else change(task, images)
    if draw.samples is None:
        order = np.random.default_rng([seed, crc32(task.encode()), crc32(b"stream")])
        return Shuffled(images, draw.batch, order)
    chosen = images.pixels[draw_indices(task, len(images.labels), draw.samples, seed)]
    return Drawn(Pictures(chosen, images.preprocess), draw.batch)
