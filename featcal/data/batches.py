"""What a calibration reads of one task: the drawn samples, made into batches whenever they are
iterated.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Batches:
    """Keyword dictionaries for a model's forward; every iteration gives the same ones.

    samples: how many were drawn.   longest: tokens of the longest text, prompt or target; 0 where
    there is no text.
    """

    samples: int
    longest: int
    make: Callable[[], Iterator[Batch]]

    def __iter__(self) -> Iterator[Batch]:
        return self.make()
