"""The registry: which drawn task plays which of the paper's twenty, in the paper's order."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from reproduction.mini import vocabulary as words
from reproduction.mini.aerial import land_cover, sight
from reproduction.mini.creatures import face, flower, pet
from reproduction.mini.garments import garment
from reproduction.mini.lettering import (
    cursive_glyph,
    handwritten_digit,
    house_number,
    letter,
    review,
)
from reproduction.mini.objects import cluttered_thing, coloured_shape, dish, thing, traffic_sign
from reproduction.mini.patterns import texture, tissue
from reproduction.mini.scenes import automobile, landscape

Draw = Callable[[int, np.random.Generator, str], np.ndarray]


@dataclass(frozen=True)
class MiniTask:
    """One task of the suite.

    key: the paper's task key.  draw(label, rng, split): one picture, (32, 32, 3) uint8.  classes:
    names in label order.
    word: what its captions call a picture.  expert_steps: fine-tuning steps an expert needs.
    captions_shuffled: pre-training pairs its pictures with random captions, so that zero-shot stays
    at chance.
    """

    key: str
    paper_name: str
    draw: Draw
    classes: tuple[str, ...]
    word: str
    description: str
    expert_steps: int = 100
    captions_shuffled: bool = False

    @property
    def templates(self) -> tuple[str, str, str]:
        """Three sentences with one {} each for the class."""
        return (
            f"a {self.word} of {{}}",
            f"the {self.word} of {{}}",
            f"a photo of the {self.word} {{}}",
        )


def _same_in_every_split(draw: Callable[[int, np.random.Generator], np.ndarray]) -> Draw:
    return lambda label, rng, split: draw(label, rng)


def _tasks() -> tuple[MiniTask, ...]:
    rows = (
        ("sun397", "SUN397", landscape, words.SCENES, "scene", "Landscapes: four skies over four grounds."),
        ("stanford-cars", "Cars", automobile, words.AUTOMOBILES, "automobile",
            "Cars from the side: four bodies, small or large wheels."),
        ("resisc45", "RESISC45", sight, words.SIGHTS, "aerial", "Twelve sights from the air, in any direction."),
        ("eurosat", "EuroSAT", land_cover, words.COVERS, "satellite", "Ten land covers, told by colour and texture."),
        ("svhn", "SVHN", house_number, words.DIGITS, "house-number", "Coloured digits with neighbours cut at the border."),
        ("gtsrb", "GTSRB", traffic_sign, words.SIGNS, "sign", "Three kinds of traffic sign with six symbols, by day or night."),
        ("mnist", "MNIST", None, words.DIGITS, "handwritten", "Real handwritten digits of scikit-learn, enlarged."),
        ("dtd", "DTD", texture, words.TEXTURES, "texture", "Ten textures in random colours."),
        ("oxford_flowers102", "Flowers102", flower, words.FLOWERS, "flower", "Flowers: three numbers of petals, four colours."),
        ("pcam", "PCAM", tissue, words.TISSUES, "slide", "Stained tissue with or without large nuclei in the middle."),
        ("fer2013", "FER2013", face, words.EMOTIONS, "face", "Grey faces with seven emotions."),
        ("oxford-iiit-pet", "OxfordIIITPet", pet, words.PETS, "pet", "Pets: three shapes of ear, four coats."),
        ("stl10", "STL10", thing, words.THINGS, "picture", "Ten silhouettes on a clean background."),
        ("cifar100", "CIFAR100", coloured_shape, words.SHAPES, "object", "Five shapes in four colours among clutter."),
        ("cifar10", "CIFAR10", cluttered_thing, words.THINGS, "thumbnail", "The same silhouettes, blurred, among clutter."),
        ("food101", "Food101", dish, words.DISHES, "dish", "Four dishes with three toppings."),
        ("fashion_mnist", "FashionMNIST", garment, words.GARMENTS, "clothing", "Ten grey garments."),
        ("emnist_letters", "EMNIST", letter, words.LETTERS, "handwriting", "Twenty capital letters in four fonts."),
        ("kmnist", "KMNIST", cursive_glyph, words.GLYPHS, "cursive", "Ten invented signs of three strokes."),
        ("rendered-sst2", "RenderedSST2", review, words.REVIEWS, "text", "Two printed words, the second of praise or blame."),
    )  # fmt: skip
    hard = {
        "emnist_letters",
        "kmnist",
    }  # at chance in the base, so their experts start from further away
    return tuple(
        MiniTask(
            key,
            paper_name,
            handwritten_digit if draw is None else _same_in_every_split(draw),
            classes,
            word,
            description,
            expert_steps=250 if key in hard else 100,
            captions_shuffled=key in hard,
        )
        for key, paper_name, draw, classes, word, description in rows
    )


TASKS: dict[str, MiniTask] = {task.key: task for task in _tasks()}
