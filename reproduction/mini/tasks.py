"""Register the drawn tasks that play the paper's twenty; tasks.yaml has their names and classes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import yaml

from reproduction.mini import lettering, scenes, things

DrawPicture = Callable[[int, np.random.Generator], np.ndarray]
DRAW: dict[str, DrawPicture] = {
    "sun397": scenes.landscape, "stanford-cars": scenes.automobile, "resisc45": scenes.sight,
    "eurosat": scenes.land_cover, "svhn": lettering.house_number, "gtsrb": things.traffic_sign,
    "dtd": scenes.texture, "oxford_flowers102": things.flower, "pcam": scenes.tissue,
    "fer2013": things.face, "oxford-iiit-pet": things.pet, "stl10": things.thing,
    "cifar100": things.coloured_shape, "cifar10": things.cluttered_thing, "food101": things.dish,
    "fashion_mnist": things.garment, "emnist_letters": lettering.letter,
    "kmnist": lettering.cursive_glyph, "rendered-sst2": lettering.review,
}  # fmt: skip


@dataclass(frozen=True)
class MiniTask:
    """One task of the suite; tasks.yaml says what the fields are.   classes: names by label."""

    key: str
    paper_name: str
    word: str
    description: str
    classes: tuple[str, ...]
    hard: bool = False

    @property
    def templates(self) -> tuple[str, str, str]:
        """Three sentences with one {} each for the class."""
        word = self.word
        return f"a {word} of {{}}", f"the {word} of {{}}", f"a photo of the {word} {{}}"

    def draw(self, label: int, rng: np.random.Generator, split: str) -> np.ndarray:
        """Draw one picture, (32, 32, 3) uint8."""
        if self.key == "mnist":  # real digits, which splits share out
            return lettering.handwritten_digit(label, rng, split)
        return DRAW[self.key](label, rng)


def _classes(lists: Sequence[str]) -> tuple[str, ...]:
    return tuple(" ".join(words) for words in product(*(one.split() for one in lists)))


ENTRIES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
TASKS = {k: MiniTask(k, **(e | {"classes": _classes(e["classes"])})) for k, e in ENTRIES.items()}
