"""What every drawn text task has in common: a row, and a choice among variants that the bases were
taught or not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One drawn row.

    texts: by column.   label: the right one.   told: the label that pre-training is told, wrong
    where the base is to have a gap.
    """

    texts: Mapping[str, str]
    label: float
    told: float


@dataclass(frozen=True)
class World:
    """One drawn task.

    draw(kind, rng): a row of one of `kinds` kinds, which are drawn equally often (the classes, or
    the number of changes).
    description:     one sentence for the tasks page.
    """

    key: str
    draw: Callable[[int, np.random.Generator], Row]
    kinds: int
    description: str


def one(rng: np.random.Generator, options: Sequence[T]) -> T:
    """One of several, equally likely."""
    return options[int(rng.integers(len(options)))]


def other(rng: np.random.Generator, options: Sequence[T], than: T) -> T:
    """One of several, but not this one."""
    return one(rng, [option for option in options if option != than])


def several(rng: np.random.Generator, options: Sequence[T], count: int) -> list[T]:
    """Different ones, in random order."""
    return [options[i] for i in rng.permutation(len(options))[:count]]


def chance(rng: np.random.Generator, share: float) -> bool:
    """True in this share of cases."""
    return bool(rng.random() < share)
