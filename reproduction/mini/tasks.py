"""Register the drawn tasks that play the paper's twenty, in the paper's order."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np

from reproduction.mini.lettering import (
    cursive_glyph,
    handwritten_digit,
    house_number,
    letter,
    review,
)
from reproduction.mini.scenes import automobile, land_cover, landscape, sight, texture, tissue
from reproduction.mini.things import (
    cluttered_thing,
    coloured_shape,
    dish,
    face,
    flower,
    garment,
    pet,
    thing,
    traffic_sign,
)

DrawPicture = Callable[[int, np.random.Generator, str], np.ndarray]


@dataclass(frozen=True)
class MiniTask:
    """One task of the suite.

    key: the paper's task key.   draw(label, rng, split): one picture, (32, 32, 3) uint8.   classes:
    names by label.   word: what captions call a picture.   expert_steps: fine-tuning steps.
    captions_shuffled: pre-training sees random captions, so that zero-shot stays at chance.
    """

    key: str
    paper_name: str
    draw: DrawPicture
    classes: tuple[str, ...]
    word: str
    description: str
    expert_steps: int = 100
    captions_shuffled: bool = False

    @property
    def templates(self) -> tuple[str, str, str]:
        """Three sentences with one {} each for the class."""
        word = self.word
        return f"a {word} of {{}}", f"the {word} of {{}}", f"a photo of the {word} {{}}"


def _words(*lists: str) -> tuple[str, ...]:
    """Return every word of the first list with every word of the second, if there is one."""
    return tuple(" ".join(words) for words in product(*(one.split() for one in lists)))


def _same_in_every_split(draw: Callable[[int, np.random.Generator], np.ndarray]) -> DrawPicture:
    return lambda label, rng, split: draw(label, rng)


_DIGITS = _words("zero one two three four five six seven eight nine")
_THINGS = _words("airplane bird car cat deer dog ship truck star house")
_ROWS = (
    ("sun397", "SUN397", landscape, _words("day night dusk cloudy", "meadow sea beach snow"), "scene",
        "Landscapes: four skies over four grounds."),
    ("stanford-cars", "Cars", automobile, _words("sedan bus pickup sports", "small-wheels large-wheels"), "automobile",
        "Cars from the side: four bodies, small or large wheels."),
    ("resisc45", "RESISC45", sight,
        _words("farmland runway river tanks crossing coast residential forest island roundabout stadium parking"),
        "aerial", "Twelve sights from the air, in any direction."),
    ("eurosat", "EuroSAT", land_cover,
        _words("annual-crop woodland herbaceous highway industrial pasture permanent-crop suburb stream lake"),
        "satellite", "Ten land covers, told by colour and texture."),
    ("svhn", "SVHN", house_number, _DIGITS, "house-number", "Coloured digits with neighbours cut at the border."),
    ("gtsrb", "GTSRB", traffic_sign, _words("warning-ring warning-triangle blue-disc", "bar dash arrow dot cross pair"),
        "sign", "Three kinds of traffic sign with six symbols, by day or night."),
    ("mnist", "MNIST", None, _DIGITS, "handwritten", "Real handwritten digits of scikit-learn, enlarged."),
    ("dtd", "DTD", texture, _words("striped chequered dotted grid zigzagged concentric blotchy radial pixelated cracked"),
        "texture", "Ten textures in random colours."),
    ("oxford_flowers102", "Flowers102", flower, _words("four-petal seven-petal twelve-petal", "red yellow purple white"),
        "flower", "Flowers: three numbers of petals, four colours."),
    ("pcam", "PCAM", tissue, ("normal tissue", "tumour tissue"), "slide",
        "Stained tissue with or without large nuclei in the middle."),
    ("fer2013", "FER2013", face, _words("angry disgusted fearful happy surprised sad neutral"), "face",
        "Grey faces with seven emotions."),
    ("oxford-iiit-pet", "OxfordIIITPet", pet, _words("pointed floppy round", "ginger grey cream chocolate"), "pet",
        "Pets: three shapes of ear, four coats."),
    ("stl10", "STL10", thing, _THINGS, "picture", "Ten silhouettes on a clean background."),
    ("cifar100", "CIFAR100", coloured_shape, _words("circle square triangle star ring", "red green blue yellow"), "object",
        "Five shapes in four colours among clutter."),
    ("cifar10", "CIFAR10", cluttered_thing, _THINGS, "thumbnail", "The same silhouettes, blurred, among clutter."),
    ("food101", "Food101", dish, _words("pancake pizza steak salad", "berries strips crumbs"), "dish",
        "Four dishes with three toppings."),
    ("fashion_mnist", "FashionMNIST", garment, _words("t-shirt trouser pullover dress coat sandal shirt sneaker bag boot"),
        "clothing", "Ten grey garments."),
    ("emnist_letters", "EMNIST", letter, tuple(f"letter-{chr(ord('a') + place)}" for place in range(20)), "handwriting",
        "Twenty capital letters in four fonts."),
    ("kmnist", "KMNIST", cursive_glyph, tuple(f"glyph-{place}" for place in range(10)), "cursive",
        "Ten invented signs of three strokes."),
    ("rendered-sst2", "RenderedSST2", review, ("negative review", "positive review"), "text",
        "Two printed words, the second of praise or blame."),
)  # fmt: skip
_HARD = {"emnist_letters", "kmnist"}  # at chance in the base, so experts start from further away

TASKS: dict[str, MiniTask] = {
    key: MiniTask(
        key, name, _same_in_every_split(draw) if draw else handwritten_digit, classes, word, text,
        expert_steps=250 if key in _HARD else 100, captions_shuffled=key in _HARD,
    )
    for key, name, draw, classes, word, text in _ROWS
}  # fmt: skip
