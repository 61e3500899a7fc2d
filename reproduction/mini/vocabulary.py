"""Class names of the twenty tasks, composed from word lists in label order. Knows neither pictures
nor models.
"""

from itertools import product

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
THINGS = ("airplane", "bird", "car", "cat", "deer", "dog", "ship", "truck", "star", "house")


def pairs(first: str, second: str) -> tuple[str, ...]:
    """Every word of the first list with every word of the second, the second running faster."""
    return tuple(" ".join(words) for words in product(first.split(), second.split()))


SCENES = pairs("day night dusk cloudy", "meadow sea beach snow")
AUTOMOBILES = pairs("sedan bus pickup sports", "small-wheels large-wheels")
SIGHTS = tuple(
    "farmland runway river tanks crossing coast residential forest island roundabout stadium parking".split()
)
COVERS = tuple(
    "annual-crop woodland herbaceous highway industrial pasture permanent-crop suburb stream lake".split()
)
SIGNS = pairs("warning-ring warning-triangle blue-disc", "bar dash arrow dot cross pair")
TEXTURES = tuple(
    "striped chequered dotted grid zigzagged concentric blotchy radial pixelated cracked".split()
)
FLOWERS = pairs("four-petal seven-petal twelve-petal", "red yellow purple white")
TISSUES = ("normal tissue", "tumour tissue")
EMOTIONS = tuple("angry disgusted fearful happy surprised sad neutral".split())
PETS = pairs("pointed floppy round", "ginger grey cream chocolate")
SHAPES = pairs("circle square triangle star ring", "red green blue yellow")
DISHES = pairs("pancake pizza steak salad", "berries strips crumbs")
GARMENTS = tuple("t-shirt trouser pullover dress coat sandal shirt sneaker bag boot".split())
LETTERS = tuple(f"letter-{chr(ord('a') + place)}" for place in range(20))
GLYPHS = tuple(f"glyph-{place}" for place in range(10))
REVIEWS = ("negative review", "positive review")
