"""Damage images and sentences in the same way every time.

Images: Gaussian noise, motion blur and fog as strong as ImageNet-C's third severity (Hendrycks and
Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and Perturbations, ICLR
2019). Its strengths are for images of 224 pixels: lengths are scaled with the width here, levels of
grey are not. Sentences: typing errors, dropped and swapped words, in three strengths.

Every image and text has a generator of its own, keyed by seed, task, damage and its index in the
split, so that its damage depends on no other and on no batch. n images · H, W height and width.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from featcal.data.images import ImageSet, Pixels, Rows
from featcal.settings import require
from reproduction.experiments import require_known
from reproduction.prepare.sources import SentenceSet

Float64s = NDArray[np.float64]
PUBLISHED_SIDE = 224  # pixels, for which lengths are stated
NOISE = 0.18  # standard deviation; white is 1
TAPS, SIGMA, WIDEST = 31, 8.0, 45.0  # points of a trail, its fading, its largest angle in degrees
FOG, WIBBLE_DECAY = 2.5, 1.7  # thickness in units of white; decay of displacements per halving

STRENGTHS = (1, 2, 3)
KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm")


def gaussian_noise(picture: Float64s, generator: np.random.Generator) -> Float64s:
    """Return x + N(0, 0.18²)."""
    return picture + generator.normal(0.0, NOISE, picture.shape)


def motion_blur(picture: Float64s, generator: np.random.Generator) -> Float64s:
    """Return the image blurred along a straight trail, within ±45° of the horizontal."""
    kernel = trail(float(generator.uniform(-WIDEST, WIDEST)), picture.shape[-1] / PUBLISHED_SIDE)
    (height, width), (_, rows, columns) = kernel.shape, picture.shape
    up, left = height // 2, width // 2
    padded = np.pad(picture, ((0, 0), (up, up), (left, left)), mode="edge")
    out = np.zeros_like(picture)
    for y, x in np.argwhere(kernel):
        out += kernel[y, x] * padded[:, y : y + rows, x : x + columns]
    return out


def trail(angle: float, scale: float) -> Float64s:
    """Return weights around a pixel, (2a + 1, 2b + 1), with sum one: exp(−k²/2σ²) at k · scale
    pixels from it, k = 0 … 30.

    A point between pixels is shared by its four neighbours in proportion to their nearness.
    """
    steps = np.arange(TAPS)
    weights = np.exp(-(steps**2) / (2 * SIGMA**2))
    along = np.deg2rad(angle)
    y, x = -np.sin(along) * steps * scale, np.cos(along) * steps * scale
    up, left = int(np.abs(y).max()) + 1, int(np.abs(x).max()) + 1
    kernel = np.zeros((2 * up + 1, 2 * left + 1))
    row, column = np.floor(y).astype(int), np.floor(x).astype(int)
    for down in (0, 1):
        for right in (0, 1):
            share = np.abs(1 - down - (y - row)) * np.abs(1 - right - (x - column))
            np.add.at(kernel, (up + row + down, left + column + right), weights * share)
    return kernel / kernel.sum()


def fog(picture: Float64s, generator: np.random.Generator) -> Float64s:
    """Return (x + 2.5 · plasma) · m / (m + 2.5), where m is the image's brightest value."""
    _, height, width = picture.shape
    brightest = float(picture.max())
    clouds = plasma(_map_side(max(height, width)), generator)[:height, :width]
    return (picture + FOG * clouds) * brightest / (brightest + FOG)


def plasma(side: int, generator: np.random.Generator) -> Float64s:
    """Return seamless random clouds (side, side) in [0, 1], side a power of two.

    Midpoint displacement: every point between known ones is their mean plus a uniform displacement,
    whose amplitude shrinks by 1.7² with every halving of the step.
    """
    field, step, amplitude = np.zeros((side, side)), side, 1.0

    def displaced(total: Float64s) -> Float64s:  # of four neighbours
        return total / 4 + amplitude * generator.uniform(-1.0, 1.0, total.shape)

    while step > 1:
        half = step // 2
        corners = field[::step, ::step]
        right, below = np.roll(corners, -1, axis=1), np.roll(corners, -1, axis=0)
        middle = displaced(corners + right + below + np.roll(below, -1, axis=1))
        field[half::step, half::step] = middle
        field[::step, half::step] = displaced(corners + right + middle + np.roll(middle, 1, axis=0))
        field[half::step, ::step] = displaced(corners + below + middle + np.roll(middle, 1, axis=1))
        step, amplitude = half, amplitude / WIBBLE_DECAY**2
    field -= field.min()
    return field / field.max()


def _map_side(side: int) -> int:
    """Return the smallest power of two that covers an image."""
    return 1 << (side - 1).bit_length()


CORRUPTIONS: dict[str, Callable[[Float64s, np.random.Generator], Float64s]] = {
    "gaussian_noise": gaussian_noise, "motion_blur": motion_blur, "fog": fog,
}  # fmt: skip


def corruption_strengths(side: int) -> dict[str, str]:
    """Return a description of each corruption of images of this width."""
    scale, radius = side / PUBLISHED_SIDE, (TAPS - 1) / 2
    return {
        "gaussian_noise": f"standard deviation {NOISE:g} of white, on every value",
        "motion_blur": f"radius {radius * scale:.1f} and σ {SIGMA * scale:.1f} pixels of {side} ({radius:g} and {SIGMA:g} of "
        f"{PUBLISHED_SIDE}), angle within ±{WIDEST:g}°",
        "fog": f"clouds of thickness {FOG:g}, displacements {WIBBLE_DECAY:g}² smaller with every halving, on a map of "
        f"{_map_side(side)} pixels ({_map_side(PUBLISHED_SIDE)} for {PUBLISHED_SIDE})",
    }


@dataclass(frozen=True)
class Corrupted:
    """Decoded images that are damaged on access, always in the same way."""

    pixels: Rows
    task: str
    corruption: str
    seed: int

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: Any, /) -> Pixels:
        """Return damaged images, (n, 3, H, W) uint8."""
        indices = np.arange(len(self))[index]
        numbered = zip(self.pixels[indices], indices.tolist(), strict=True)
        return np.stack([self._damaged(picture, index) for picture, index in numbered])

    def _damaged(self, picture: Pixels, index: int) -> Pixels:
        key = [self.seed, crc32(self.task.encode()), crc32(self.corruption.encode()), index]
        changed = CORRUPTIONS[self.corruption](picture / 255.0, np.random.default_rng(key))
        return np.rint(255 * np.clip(changed, 0.0, 1.0)).astype(np.uint8)


def corrupted(images: ImageSet, task: str, corruption: str, seed: int) -> ImageSet:
    """Return the images, every one damaged. Raises: UnknownKey for the corruption."""
    require_known("corruption", corruption, CORRUPTIONS)
    return replace(images, pixels=Corrupted(images.pixels, task, corruption, seed))


def typing_errors(text: str, share: float, generator: np.random.Generator) -> str:
    """Change each letter with probability `share`: drop it, double it, exchange it with the next,
    or type its neighbour on the keyboard.
    """
    letters, out, position = list(text), [], 0
    while position < len(letters):
        letter = letters[position]
        position += 1
        if letter.isalpha() and generator.random() < share:
            kind = generator.integers(4)
            if kind == 0:
                continue
            if kind == 1:
                letter += letter
            elif kind == 2 and position < len(letters):
                letter = letters[position] + letter
                position += 1
            else:
                letter = neighbour(letter, generator)
        out.append(letter)
    return "".join(out)


def neighbour(letter: str, generator: np.random.Generator) -> str:
    """Return a neighbour in the keyboard's row, or the letter itself if it is in none."""
    for row in KEYBOARD:
        column = row.find(letter.lower())
        if column >= 0:
            near = row[max(column - 1, 0) : column] + row[column + 1 : column + 2]
            typed = near[int(generator.integers(len(near)))]
            return typed.upper() if letter.isupper() else typed
    return letter


def dropped_words(text: str, share: float, generator: np.random.Generator) -> str:
    """Drop each word with probability `share`; at least one stays."""
    tokens = text.split()
    remains = generator.random(len(tokens)) >= share
    if tokens and not remains.any():
        remains[int(generator.integers(len(tokens)))] = True
    return " ".join(token for token, keep in zip(tokens, remains, strict=True) if keep)


def swapped_words(text: str, share: float, generator: np.random.Generator) -> str:
    """Exchange each word with the next with probability `share`, from first to last; a moved word
    may move on.
    """
    tokens = text.split()
    for position in range(len(tokens) - 1):
        if generator.random() < share:
            tokens[position], tokens[position + 1] = tokens[position + 1], tokens[position]
    return " ".join(tokens)


# by damage: the function, its share in each strength, and of what
DAMAGES: dict[str, tuple[Callable[..., str], tuple[float, ...], str]] = {
    "typing_errors": (
        typing_errors, (0.04, 0.08, 0.16),
        "of the letters left out, doubled, exchanged with the next or replaced by a neighbour on the keyboard",
    ),
    "dropped_words": (dropped_words, (0.1, 0.2, 0.4), "of the words left out"),
    "swapped_words": (swapped_words, (0.1, 0.2, 0.4), "of the words exchanged with the next"),
}  # fmt: skip


def damage_strengths() -> dict[str, str]:
    """Return a description of each damage of texts."""
    return {
        name: f"{', '.join(f'{100 * share:g}' for share in shares)} % {description}"
        for name, (_, shares, description) in DAMAGES.items()
    }


def damaged(
    sentences: SentenceSet, task: str, damage: str, strength: int, seed: int
) -> SentenceSet:
    """Return the sentences in their order, every one damaged. Raises: UnknownKey, BadSetting."""
    require_known("damage", damage, DAMAGES)
    require(strength in STRENGTHS, "strength", strength, "must be 1, 2 or 3")
    change, shares, _ = DAMAGES[damage]
    key = [seed, crc32(task.encode()), crc32(damage.encode()), strength]
    rows = zip(sentences.texts, sentences.rows.tolist(), strict=True)
    share = shares[strength - 1]
    return sentences.reading(
        [change(text, share, np.random.default_rng([*key, row])) for text, row in rows]
    )
