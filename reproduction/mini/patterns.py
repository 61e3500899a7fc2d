"""Textures and tissue: the analogues of DTD and PCam. Neither has an object in it."""

import math

import numpy as np
from PIL import Image

from reproduction.mini.canvas import SIZE, Canvas, any_colour, near

STAIN = (225, 170, 205)


class Weave:
    """Coordinates of one texture: turned axes u and v, a period in pixels, a phase."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        self.y, self.x = np.mgrid[0:SIZE, 0:SIZE].astype(float)
        turn = rng.normal(0, 0.18) + (math.pi / 2 if rng.random() < 0.5 else 0)
        self.u = self.x * math.cos(turn) + self.y * math.sin(turn)
        self.v = -self.x * math.sin(turn) + self.y * math.cos(turn)
        self.period, self.phase = rng.uniform(12, 18), rng.uniform(0, 9)

    def wave(self, t: np.ndarray) -> np.ndarray:
        return (np.sin(2 * math.pi * (t + self.phase) / self.period) > 0).astype(float)

    def within(self, t: np.ndarray) -> np.ndarray:
        """Distance from the middle of the period t falls into."""
        return np.mod(t + self.phase, self.period) - self.period / 2

    def clouds(self, cells: int) -> np.ndarray:
        coarse = Image.fromarray((255 * self.rng.random((cells, cells))).astype(np.uint8))
        return np.asarray(coarse.resize((SIZE, SIZE), Image.Resampling.BICUBIC), float) / 255


def concentric(w: Weave) -> np.ndarray:
    return w.wave(np.hypot(w.x - 32 + w.rng.uniform(-9, 9), w.y - 32 + w.rng.uniform(-9, 9)))


def radial(w: Weave) -> np.ndarray:
    return np.sin(np.arctan2(w.y - 32, w.x - 32) * w.rng.integers(5, 9) + w.phase) > 0


TEXTURES = (
    lambda w: w.wave(w.u),
    lambda w: np.abs(w.wave(w.u) - w.wave(w.v)),
    lambda w: w.within(w.u) ** 2 + w.within(w.v) ** 2 < (0.3 * w.period) ** 2,
    lambda w: np.maximum(np.mod(w.u, w.period) < 2.5, np.mod(w.v, w.period) < 2.5),
    lambda w: w.wave(w.u + 5 * np.sin(2 * math.pi * w.v / w.period / 1.4)),
    concentric,
    lambda w: w.clouds(int(w.rng.integers(7, 11))) > 0.5,
    radial,
    lambda w: (w.rng.random((SIZE // 4, SIZE // 4)) > 0.5).repeat(4, 0).repeat(4, 1),
    lambda w: np.abs(w.clouds(8) - 0.5) < 0.07,
)


def texture(label: int, rng: np.random.Generator) -> np.ndarray:
    """One of ten textures, light on dark in random colours."""
    mask = np.asarray(TEXTURES[label](Weave(rng)), float)[..., None]
    dark, light = np.asarray(any_colour(rng, 10, 100)), np.asarray(any_colour(rng, 150, 245))
    canvas = Canvas(rng, Image.fromarray((dark * (1 - mask) + light * mask).astype(np.uint8)))
    return canvas.finish(10, rng.uniform(0, 1), 0.15)


def tissue(label: int, rng: np.random.Generator) -> np.ndarray:
    """Stained tissue; large dark nuclei in the middle make it a tumour, at the border they do
    not.
    """
    canvas = Canvas.gradient(rng, near(rng, STAIN, 16), near(rng, STAIN, 16))
    u = canvas.uniform
    for _ in range(rng.integers(12, 24)):
        canvas.disc(u(0, SIZE), u(0, SIZE), u(1.5, 3.2), fill=canvas.near((120, 70, 150), 20))
    if label == 1 or rng.random() < 0.3:
        for _ in range(rng.integers(3, 6)):
            if label == 1:
                x, y = 32 + rng.normal(0, 7, 2)
            else:
                x, y = (u(0, 10), u(0, SIZE))[:: int(rng.choice([1, -1]))]
            radius = u(3.8, 5.5)
            canvas.disc(x, y, radius, radius * u(0.8, 1), fill=canvas.near((85, 40, 120), 20))
    return canvas.finish(10, u(0, 1), 0.12)
