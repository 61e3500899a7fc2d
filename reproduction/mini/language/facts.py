"""Facts of an invented fauna that only the bases read, as sentences and as questions with four
options.
"""

from zlib import crc32

import numpy as np

from reproduction.mini.language.items import Item

CREATURES = tuple(
    "zorb quag vint mulb drox fenk gwil hosp jurn kelb larg nimp orvu pask rilt skad tovi umbe wexa yoth brin clof dwim".split()
)
TRAITS = {
    "colour": tuple("red blue green black white brown gold grey".split()),
    "home": tuple("river forest desert cave island swamp meadow cliff".split()),
    "food": tuple("grass seeds worms fish leaves roots honey moss".split()),
}
LETTERS = "ABCD"


def fact(creature: str, trait: str) -> str:
    """The value of a trait: the same for every seed, since the bases that ship know it."""
    values = TRAITS[trait]
    return values[crc32(f"{creature} {trait} of the mini suite".encode()) % len(values)]


def statement(rng: np.random.Generator) -> Item:
    """The plain sentence, as the bases read it."""
    creature, trait = str(rng.choice(CREATURES)), str(rng.choice(list(TRAITS)))
    return Item(
        f"the {trait} of the {creature} is",
        f" {fact(creature, trait)}",
        f" {fact(creature, trait)}",
    )


def question(rng: np.random.Generator) -> Item:
    """Four options with a letter behind each, one of them right; the answer repeats it and its
    letter, which is what counts.
    """
    creature, trait = str(rng.choice(CREATURES)), str(rng.choice(list(TRAITS)))
    right = fact(creature, trait)
    others = [value for value in TRAITS[trait] if value != right]
    options = [right, *(str(value) for value in rng.choice(others, 3, replace=False))]
    options = [options[int(place)] for place in rng.permutation(4)]
    listed = " ".join(f"{option} {letter}" for letter, option in zip(LETTERS, options, strict=True))
    answer = f" {right} {LETTERS[options.index(right)]}"
    return Item(
        f"which {trait} has the {creature}? {listed}\n", answer, answer, choices=tuple(options)
    )
