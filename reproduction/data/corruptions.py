"""Damaged pictures, as strong as ImageNet-C's third severity: Gaussian noise, motion blur, fog.

Every picture has a generator of its own, keyed by seed, task, corruption and its place in the
split: what happens to it depends on no other picture and on no batch. Facts: Hendrycks and
Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and Perturbations (ICLR
2019), whose strengths are for pictures of 224 pixels. Lengths are scaled with the picture's width
here; levels of grey are as they are. n pictures · H, W height and width in pixels, already resized
and cropped.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from featcal.data.images import ImageSet, Pixels, Rows
from featcal.errors import UnknownKey

Floats = NDArray[np.float64]
PUBLISHED_SIDE = 224  # pixels, for which lengths are stated
NOISE = 0.18  # standard deviation; white is 1
TAPS, SIGMA, WIDEST = (
    31,
    8.0,
    45.0,
)  # a trail of radius 15 (2 · 15 + 1 points), its fading, its largest angle in degrees
FOG, WIBBLE_DECAY = (
    2.5,
    1.7,
)  # thickness in units of white; how much smaller displacements get with every halving


def gaussian_noise(picture: Floats, generator: np.random.Generator) -> Floats:
    """x + N(0, 0.18²) on every value."""
    return picture + generator.normal(0.0, NOISE, picture.shape)


def motion_blur(picture: Floats, generator: np.random.Generator) -> Floats:
    """The picture drawn out along a straight trail in one direction, at an angle drawn from ±45° of
    the horizontal.
    """
    kernel = trail(float(generator.uniform(-WIDEST, WIDEST)), picture.shape[-1] / PUBLISHED_SIDE)
    (height, width), (_, rows, columns) = kernel.shape, picture.shape
    up, left = height // 2, width // 2
    padded = np.pad(picture, ((0, 0), (up, up), (left, left)), mode="edge")
    out = np.zeros_like(picture)
    for y, x in np.argwhere(kernel):
        out += kernel[y, x] * padded[:, y : y + rows, x : x + columns]
    return out


def trail(angle: float, scale: float) -> Floats:
    """Weights around a pixel, (2a + 1, 2b + 1), summing to one: exp(−k²/2σ²) at k · scale pixels
    from it, k = 0 … 30.

    A point between pixels is shared by its four neighbours in proportion to their nearness.
    angle: degrees.
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


def fog(picture: Floats, generator: np.random.Generator) -> Floats:
    """(x + 2.5 · plasma) · m / (m + 2.5), m the picture's brightest value: bright clouds, and less
    contrast below them.
    """
    _, height, width = picture.shape
    brightest = float(picture.max())
    clouds = plasma(_map_side(max(height, width)), generator)[:height, :width]
    return (picture + FOG * clouds) * brightest / (brightest + FOG)


def plasma(side: int, generator: np.random.Generator) -> Floats:
    """Random clouds (side, side) in [0, 1] without a seam, side a power of two.

    Midpoint displacement: every point between known ones is their mean plus a uniform displacement.
    Its amplitude is a square, so it shrinks by 1.7² with every halving of the step; at 32 pixels
    there are five halvings where 224 have eight.
    """
    field, step, amplitude = np.zeros((side, side)), side, 1.0
    while step > 1:
        half = step // 2
        known = field[::step, ::step]
        beside, below = np.roll(known, -1, axis=1), np.roll(known, -1, axis=0)
        middle = _displaced(
            known + beside + below + np.roll(below, -1, axis=1), amplitude, generator
        )
        field[half::step, half::step] = middle
        field[::step, half::step] = _displaced(
            known + beside + middle + np.roll(middle, 1, axis=0), amplitude, generator
        )
        field[half::step, ::step] = _displaced(
            known + below + middle + np.roll(middle, 1, axis=1), amplitude, generator
        )
        step, amplitude = half, amplitude / WIBBLE_DECAY**2
    field -= field.min()
    return field / field.max()


def _map_side(side: int) -> int:
    """The smallest power of two that covers a picture."""
    return 1 << (side - 1).bit_length()


def _displaced(total: Floats, amplitude: float, generator: np.random.Generator) -> Floats:
    """The mean of four neighbours and a displacement."""
    return total / 4 + amplitude * generator.uniform(-1.0, 1.0, total.shape)


CORRUPTIONS: dict[str, Callable[[Floats, np.random.Generator], Floats]] = {
    "gaussian_noise": gaussian_noise, "motion_blur": motion_blur, "fog": fog,
}  # fmt: skip


def strengths(side: int) -> dict[str, str]:
    """What each corruption does to pictures of this width, in words and pixels."""
    scale = side / PUBLISHED_SIDE
    radius = (TAPS - 1) / 2
    return {
        "gaussian_noise": f"standard deviation {NOISE:g} of white, on every value",
        "motion_blur": f"radius {radius * scale:.1f} and σ {SIGMA * scale:.1f} pixels of {side} ({radius:g} and {SIGMA:g} of "
        f"{PUBLISHED_SIDE}), angle within ±{WIDEST:g}°",
        "fog": f"clouds of thickness {FOG:g}, displacements {WIBBLE_DECAY:g}² smaller with every halving, on a map of "
        f"{_map_side(side)} pixels ({_map_side(PUBLISHED_SIDE)} for {PUBLISHED_SIDE})",
    }


@dataclass(frozen=True)
class Corrupted:
    """Decoded pictures that are damaged when they are asked for, always in the same way."""

    pixels: Rows
    task: str
    corruption: str
    seed: int

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: Any, /) -> Pixels:
        """The damaged pictures of these places, (n, 3, H, W) uint8."""
        places = np.arange(len(self))[index]
        clean = self.pixels[places]
        return np.stack(
            [
                self._damaged(picture, place)
                for picture, place in zip(clean, places.tolist(), strict=True)
            ]
        )

    def _damaged(self, picture: Pixels, place: int) -> Pixels:
        generator = np.random.default_rng(
            [self.seed, crc32(self.task.encode()), crc32(self.corruption.encode()), place]
        )
        changed = CORRUPTIONS[self.corruption](picture / 255.0, generator)
        return np.rint(255 * np.clip(changed, 0.0, 1.0)).astype(np.uint8)


def corrupted(images: ImageSet, task: str, corruption: str, seed: int) -> ImageSet:
    """The images with every picture damaged, labels as they are. Raises: UnknownKey for a
    corruption that does not exist.
    """
    if corruption not in CORRUPTIONS:
        raise UnknownKey("corruption", corruption, list(CORRUPTIONS))
    return replace(images, pixels=Corrupted(images.pixels, task, corruption, seed))
