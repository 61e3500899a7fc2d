"""Draw one picture on a canvas of 64x64, which is then reduced to 32x32 pixels.

Every random choice comes from the given generator, so a picture is a function of its state.
"""

import math
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

SIZE = 64  # drawn at twice the final side: reducing is the antialiasing
SIDE = 32
# one factor on noise, blur and brightness of all tasks; chosen so that experts reach about 90 %
NUISANCE = 0.65
FONTS = {
    "sans": "DejaVuSans.ttf",
    "sans-bold": "DejaVuSans-Bold.ttf",
    "serif": "DejaVuSerif.ttf",
    "serif-bold": "DejaVuSerif-Bold.ttf",
    "times-bold": "STIXGeneralBol.ttf",
}
Colour = tuple[int, int, int]


@cache
def font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """Return one of matplotlib's fonts, with the layout engine that is always installed."""
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / FONTS[name]
    return ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)


def near(rng: np.random.Generator, colour, spread: float = 22) -> Colour:
    """Return the colour with normal noise of that standard deviation per channel."""
    return tuple(int(np.clip(value + rng.normal(0, spread), 0, 255)) for value in colour)


def any_colour(rng: np.random.Generator, low: int = 20, high: int = 235) -> Colour:
    return tuple(int(value) for value in rng.integers(low, high, 3))


def regular_polygon(
    x: float, y: float, radius: float, corners: int, turn: float = 0.0
) -> list[tuple[float, float]]:
    angles = [turn + 2 * math.pi * corner / corners for corner in range(corners)]
    return [(x + radius * math.cos(angle), y + radius * math.sin(angle)) for angle in angles]


def star(x: float, y: float, radius: float, turn: float) -> list[tuple[float, float]]:
    """Return a star of five points."""
    outer, inner = (regular_polygon(x, y, reach, 10, turn) for reach in (radius, 0.45 * radius))
    return [(inner if i % 2 else outer)[i] for i in range(10)]


class Canvas:
    """A picture being drawn: shapes first, then `affine`, then `finish`."""

    def __init__(self, rng: np.random.Generator, image: Image.Image):
        self.rng, self.image, self.pen = rng, image, ImageDraw.Draw(image)

    @classmethod
    def plain(cls, rng, colour: Colour = (0, 0, 0)) -> "Canvas":
        return cls(rng, Image.new("RGB", (SIZE, SIZE), colour))

    @classmethod
    def gradient(cls, rng, first: Colour, second: Colour) -> "Canvas":
        """Return a background from one colour to the other in a random direction."""
        angle = rng.uniform(0, 2 * math.pi)
        y, x = np.mgrid[0:SIZE, 0:SIZE] / SIZE - 0.5
        share = np.clip(0.5 + math.cos(angle) * x + math.sin(angle) * y, 0, 1)[..., None]
        pixels = np.asarray(first) * (1 - share) + np.asarray(second) * share
        return cls(rng, Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)))

    def uniform(self, low: float, high: float) -> float:
        return float(self.rng.uniform(low, high))

    def near(self, colour, spread: float = 22) -> Colour:
        return near(self.rng, colour, spread)

    def box(self, x0: float, y0: float, x1: float, y1: float, fill: Colour) -> None:
        """Fill a rectangle between corners in any order, which Pillow would refuse."""
        self.pen.rectangle([min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1)], fill=fill)

    def disc(self, x, y, rx, ry=None, fill=None, outline=None, width: int = 1) -> None:
        """Draw an ellipse around (x, y), or a circle without `ry`."""
        rx, ry = abs(rx), abs(rx if ry is None else ry)
        self.pen.ellipse([x - rx, y - ry, x + rx, y + ry], fill=fill, outline=outline, width=width)

    def line(self, points, fill: Colour, width: int) -> None:
        self.pen.line([tuple(point) for point in points], fill=fill, width=width, joint="curve")

    def polygon(self, points, fill: Colour) -> None:
        self.pen.polygon([tuple(point) for point in points], fill=fill)

    def text(self, string: str, face: str, size: int, x: float, y: float, fill: Colour) -> None:
        self.pen.text((x, y), string, font=font(face, size), fill=fill, anchor="mm")

    def clutter(self, most: int) -> None:
        """Draw up to `most` small discs and lines that mean nothing."""
        for _ in range(self.rng.integers(0, most + 1)):
            x, y = self.rng.uniform(0, SIZE, 2)
            radius, colour = self.uniform(2, 8), any_colour(self.rng)
            if self.rng.random() < 0.5:
                self.disc(x, y, radius, 0.7 * radius, fill=colour)
            else:
                end = (x + self.rng.normal(0, 20), y + self.rng.normal(0, 20))
                self.line([(x, y), end], colour, 2)

    def replaced(self, image: Image.Image) -> "Canvas":
        """Go on with another image (the old pen would draw on the old one)."""
        self.image, self.pen = image, ImageDraw.Draw(image)
        return self

    def maybe_mirrored(self) -> "Canvas":
        if self.rng.random() < 0.5:
            return self.replaced(self.image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
        return self

    def affine(self, degrees: float, zoom: float, shift: float) -> "Canvas":
        """Turn, zoom and move by random amounts up to the given ones, on black."""
        angle = math.radians(self.uniform(-degrees, degrees))
        scale = 1 / (1 + self.uniform(-zoom, zoom))
        c, s = math.cos(angle) * scale, math.sin(angle) * scale
        dx, dy = self.rng.uniform(-shift, shift, 2)
        middle = SIZE / 2
        x0 = middle - c * (middle + dx) + s * (middle + dy)
        y0 = middle - s * (middle + dx) - c * (middle + dy)
        matrix = (c, -s, x0, s, c, y0)
        options = Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR
        return self.replaced(self.image.transform((SIZE, SIZE), *options))

    def finish(self, noise: float, blur: float, brightness: float) -> np.ndarray:
        """Blur, reduce to 32x32, brighten and add noise. Returns: (32, 32, 3) uint8."""
        noise, blur, brightness = NUISANCE * noise, NUISANCE * blur, NUISANCE * brightness
        image = self.image.filter(ImageFilter.GaussianBlur(blur)) if blur > 0 else self.image
        pixels = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX), np.float32)
        brighter = pixels * (1 + self.rng.normal(0, brightness))
        pixels = brighter + self.rng.normal(0, 12) * brightness / 0.15 * 0.6
        pixels = pixels + self.rng.normal(0, noise, pixels.shape)
        return np.clip(pixels, 0, 255).astype(np.uint8)
