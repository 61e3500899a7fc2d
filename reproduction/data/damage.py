"""Damaged sentences, three kinds in three strengths: typing errors, dropped words, swapped words.

Every text has a generator of its own, keyed by seed, task, damage, strength and its row in the
file: what happens to it depends on no other text and on no batch. A word is what stands between
blanks.
"""

from collections.abc import Callable
from zlib import crc32

import numpy as np

from featcal.errors import UnknownKey
from featcal.settings import require
from reproduction.data.sentences import SentenceSet

STRENGTHS = (1, 2, 3)
TYPED = (0.04, 0.08, 0.16)  # of the letters
DROPPED = (0.1, 0.2, 0.4)  # of the words
SWAPPED = (0.1, 0.2, 0.4)  # of the pairs of neighbours
ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")  # of a keyboard


def typing_errors(text: str, share: float, generator: np.random.Generator) -> str:
    """Each letter with probability `share` left out, doubled, exchanged with the next, or its
    neighbour on the keyboard.
    """
    letters, out, place = list(text), [], 0
    while place < len(letters):
        letter = letters[place]
        place += 1
        if letter.isalpha() and generator.random() < share:
            kind = generator.integers(4)
            if kind == 0:
                continue
            if kind == 1:
                letter += letter
            elif kind == 2 and place < len(letters):
                letter = letters[place] + letter
                place += 1
            else:
                letter = beside(letter, generator)
        out.append(letter)
    return "".join(out)


def beside(letter: str, generator: np.random.Generator) -> str:
    """A neighbour in the same row of the keyboard; the letter itself where it is in none."""
    for row in ROWS:
        place = row.find(letter.lower())
        if place >= 0:
            neighbours = row[max(place - 1, 0) : place] + row[place + 1 : place + 2]
            typed = neighbours[int(generator.integers(len(neighbours)))]
            return typed.upper() if letter.isupper() else typed
    return letter


def dropped_words(text: str, share: float, generator: np.random.Generator) -> str:
    """Each word left out with probability `share`; one of them stays where all would go."""
    words = text.split()
    stays = generator.random(len(words)) >= share
    if words and not stays.any():
        stays[int(generator.integers(len(words)))] = True
    return " ".join(word for word, kept in zip(words, stays, strict=True) if kept)


def swapped_words(text: str, share: float, generator: np.random.Generator) -> str:
    """Each word exchanged with the next with probability `share`, from the first to the last; a
    moved word may move on.
    """
    words = text.split()
    for place in range(len(words) - 1):
        if generator.random() < share:
            words[place], words[place + 1] = words[place + 1], words[place]
    return " ".join(words)


Damage = Callable[[str, float, np.random.Generator], str]
DAMAGES: dict[str, tuple[Damage, tuple[float, ...]]] = {
    "typing_errors": (typing_errors, TYPED), "dropped_words": (dropped_words, DROPPED), "swapped_words": (swapped_words, SWAPPED),
}  # fmt: skip


def strengths() -> dict[str, str]:
    """What each damage does, in words and numbers."""
    told = {
        "typing_errors": "of the letters left out, doubled, exchanged with the next or replaced by a neighbour on the keyboard",
        "dropped_words": "of the words left out",
        "swapped_words": "of the words exchanged with the next",
    }
    return {
        name: f"{', '.join(f'{100 * s:g}' for s in DAMAGES[name][1])} % {words}"
        for name, words in told.items()
    }


def damaged(
    sentences: SentenceSet, task: str, damage: str, strength: int, seed: int
) -> SentenceSet:
    """The sentences with every text damaged, in the order they were in, labels as they are. Raises:
    UnknownKey, BadSetting.
    """
    if damage not in DAMAGES:
        raise UnknownKey("damage", damage, list(DAMAGES))
    require(strength in STRENGTHS, "strength", strength, "must be 1, 2 or 3")
    change, shares = DAMAGES[damage]
    key = [seed, crc32(task.encode()), crc32(damage.encode()), strength]
    rows = zip(sentences.texts, sentences.rows.tolist(), strict=True)
    return sentences.reading(
        [
            change(text, shares[strength - 1], np.random.default_rng([*key, row]))
            for text, row in rows
        ]
    )
