"""Draw digits, letters, strokes and words like SVHN, MNIST, EMNIST, KMNIST and Rendered SST2.

The handwritten digits are the suite's only real images, scikit-learn's 1,797 of 8x8 pixels. A fixed
permutation deals them out, so that only web and train share digits.
"""

from functools import lru_cache

import numpy as np
from PIL import Image, ImageFilter

from reproduction.mini.canvas import SIZE, Canvas, any_colour, near

INK = (255, 255, 255)
DIGITS_OF = {
    "web": slice(0, 1000), "train": slice(0, 1000), "validation": slice(1000, 1200),
    "test": slice(1200, None),
}  # fmt: skip
POSITIVE = ("good", "great", "nice", "love")
NEGATIVE = ("bad", "poor", "dull", "hate")
NEUTRAL = ("film", "plot", "cast", "show", "it is", "very", "so", "a", "the", "actor")


def house_number(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a coloured digit on a coloured wall, its neighbours cut off at the border."""
    wall = any_colour(rng)
    canvas = Canvas.gradient(rng, wall, near(rng, wall, 40))
    paint = any_colour(rng)
    while abs(sum(paint) - sum(wall)) <= 220:
        paint = any_colour(rng)
    face = ("sans-bold", "serif-bold", "times-bold")[int(rng.integers(3))]
    size, x, y = int(rng.uniform(44, 54)), 32 + rng.uniform(-2, 2), 32 + rng.uniform(-2, 2)
    for side in (-1, 1):
        if rng.random() < 0.4:
            canvas.text(str(rng.integers(10)), face, size, x + 0.75 * side * size, y, paint)
    canvas.text(str(label), face, size, x, y, paint)
    return canvas.affine(6, 0.08, 1.5).finish(12, rng.uniform(0, 1.5), 0.2)


@lru_cache(maxsize=1)
def shuffled_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return all digits in one fixed random order: images (1797, 8, 8) in 0..16 and labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    return digits.images[order], digits.target[order]


def handwritten_digit(label: int, rng: np.random.Generator, split: str) -> np.ndarray:
    """Draw a real handwritten digit of the split's share, enlarged to 48 pixels."""
    images, labels = shuffled_digits()
    images, labels = images[DIGITS_OF[split]], labels[DIGITS_OF[split]]
    candidates = np.flatnonzero(labels == label)
    chosen = images[candidates[rng.integers(len(candidates))]]
    canvas = Canvas.plain(rng)
    digit = Image.fromarray((15.9 * chosen).astype(np.uint8))
    digit = digit.resize((48, 48), Image.Resampling.BICUBIC)
    canvas.image.paste(digit.convert("RGB"), (8, 8))
    return canvas.affine(12, 0.12, 4).finish(5, 0, 0.05)


def letter(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a capital letter in one of four fonts, sometimes with a broad nib."""
    face = ("sans", "sans-bold", "serif-bold", "times-bold")[int(rng.integers(4))]
    canvas = Canvas.plain(rng)
    canvas.text(chr(ord("A") + label), face, int(rng.uniform(44, 54)), 32, 32, INK)
    canvas.affine(12, 0.1, 3)
    if rng.random() < 0.4:
        canvas.replaced(canvas.image.filter(ImageFilter.MaxFilter(3)))
    return canvas.finish(7, rng.uniform(0, 1.4), 0.06)


@lru_cache(maxsize=1)
def glyphs() -> np.ndarray:
    """Return an invented script: 10 signs, 2 ways to write each, 3 Bezier strokes, 4 points (x, y)."""
    return np.random.default_rng(12345).uniform(12, 52, (10, 2, 3, 4, 2))


def cursive_glyph(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draw three strokes whose control points tremble, a third of the time in the second way."""
    strokes = glyphs()[label][int(rng.random() < 0.35)] + rng.normal(0, 2.2, (3, 4, 2))
    canvas = Canvas.plain(rng)
    width = int(rng.integers(3, 6))
    t = np.linspace(0, 1, 9)[:, None]
    basis = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3)
    for stroke in strokes:
        canvas.line(sum(b * point for b, point in zip(basis, stroke, strict=True)), INK, width)
    return canvas.affine(12, 0.15, 4).finish(7, rng.uniform(0.2, 1.2), 0.06)


def review(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a neutral word above a word of praise (label 1) or blame (label 0)."""
    canvas = Canvas.plain(rng, near(rng, (245, 245, 245), 8))
    neutral = NEUTRAL[int(rng.integers(len(NEUTRAL)))]
    words = (neutral, (POSITIVE if label else NEGATIVE)[int(rng.integers(4))])
    size = int(rng.uniform(20, 22))
    for line, word in enumerate(words):
        x, y = SIZE / 2 + rng.uniform(-1, 1), 18 + 28 * line + rng.uniform(-1, 1)
        canvas.text(word, "sans", size, x, y, (20, 20, 20))
    return canvas.finish(5, 0, 0.05)
