"""One drawn text with its answer, and which split it belongs to.

A prompt belongs to one split by its own checksum, whatever drew it, so no training text can meet a
test prompt.
"""

from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

import numpy as np

SHARES = {
    "test": (0, 15),
    "validation": (15, 25),
    "train": (25, 100),
}  # of all prompts, by checksum modulo 100
ATTEMPTS = 10_000  # draws for one new prompt before its kind counts as exhausted


@dataclass(frozen=True)
class Item:
    """A prompt and what should follow it.

    target:       the reference answer, without the line break that ends it.
    careless:     what a hasty writer answers, incomplete or wrong.
    tempting:     whether hasty writers answer this kind of prompt, told by something plain in it.
                  The bases read them there and
                  have the skill but not the habit of using it; experts read careful writers only.
    header:       code that stands before a generated program; "" where the program is whole.
    tests:        assertions that a generated program must pass.
    instructions: named checks of the answer, as reproduction.language.answers reads them.
    choices:      the options of a multiple-choice question, A first.
    """

    prompt: str
    target: str
    careless: str
    tempting: bool = False
    header: str = ""
    tests: tuple[str, ...] = ()
    instructions: tuple[dict[str, object], ...] = ()
    choices: tuple[str, ...] = ()


Draw = Callable[[np.random.Generator], Item]


def split_of(prompt: str) -> str:
    """The one split that a prompt may occur in."""
    place = crc32(prompt.encode()) % 100
    return next(split for split, (first, end) in SHARES.items() if first <= place < end)


def generator(seed: int, kind: str, split: str, index: int) -> np.random.Generator:
    """A generator of its own for every row."""
    return np.random.default_rng([seed, crc32(kind.encode()), crc32(split.encode()), index])


def draw_item(
    draw: Draw, rng: np.random.Generator, split: str, seen: set[str] | None = None
) -> Item:
    """The first item drawn that belongs to the split and whose prompt is not in `seen`; the prompt
    is added there.
    """
    for _ in range(ATTEMPTS):
        item = draw(rng)
        if split_of(item.prompt) == split and (seen is None or item.prompt not in seen):
            if seen is not None:
                seen.add(item.prompt)
            return item
    raise AssertionError(f"no further prompt for {split} in {ATTEMPTS} draws")
