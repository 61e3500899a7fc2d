"""Draw landscapes, cars, the earth from above, textures and tissue, one picture at a time.

The analogues of SUN397, Stanford Cars, RESISC45, EuroSAT, DTD and PCam; scenes.yaml has colours.
"""

import math
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from reproduction.mini.canvas import SIZE, Canvas, any_colour, near, regular_polygon

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
SKIES, GROUNDS, THINGS, CABINS, LANDS, COVERS = (list(part.values()) for part in TABLES.values())
BUS = 1


def landscape(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draw sky (label // 4) over ground (label % 4), with trees, houses and hills among them."""
    sky, ground = SKIES[label // 4], GROUNDS[label % 4]
    canvas = Canvas.gradient(rng, near(rng, sky, 25), near(rng, sky, 25))
    horizon = int(rng.uniform(26, 44))
    canvas.box(0, horizon, SIZE, SIZE, canvas.near(ground))
    for _ in range(rng.integers(1, 5)):
        x, width, kind = rng.uniform(0, SIZE), rng.uniform(5, 14), rng.random()
        colour = canvas.near(THINGS[int(rng.integers(3))], 30)
        if kind < 0.4:
            top = (x, horizon - 1.8 * width)
            canvas.polygon([(x - width, horizon + 2), top, (x + width, horizon + 2)], colour)
        elif kind < 0.7:
            canvas.box(x - 0.6 * width, horizon - 1.5 * width, x + 0.6 * width, horizon + 3, colour)
        else:
            canvas.disc(x, horizon - 0.3 * width, width, 0.7 * width, fill=colour)
    for _ in range(rng.integers(2, 8)):
        x, y = rng.uniform(0, SIZE), rng.uniform(horizon, SIZE)
        end = (x + rng.uniform(4, 16), y + rng.normal(0, 2))
        canvas.line([(x, y), end], canvas.near(ground, 45), 2)
    return canvas.finish(14, rng.uniform(0, 1.2), 0.22)


def automobile(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a body shape (label // 2) on small or large wheels (label % 2), in any colour."""
    body, large_wheels = label // 2, label % 2 == 1
    canvas = Canvas.gradient(rng, any_colour(rng, 60, 220), any_colour(rng, 60, 220))
    canvas.box(0, 44, SIZE, SIZE, canvas.near((100, 100, 100), 25))
    paint = any_colour(rng)
    left, right, bottom = 7 + rng.uniform(-3, 3), 57 + rng.uniform(-3, 3), 46 + rng.uniform(-3, 3)
    shoulder, length = bottom - rng.uniform(11, 14), right - left
    canvas.box(left, shoulder, right, bottom, paint)
    roof = shoulder - rng.uniform(10, 13) - (4 if body == BUS else 0)
    corners = [left + share * length for share in CABINS[body]]
    canvas.polygon(list(zip(corners, (shoulder, roof, roof, shoulder), strict=True)), paint)
    _windows(canvas, corners[1] + 0.03 * length, corners[2] - 0.03 * length, roof + 3, shoulder - 2)
    radius = 7.6 if large_wheels else 3.6
    for x in (left + 0.22 * length, left + 0.78 * length):
        canvas.disc(x, bottom, radius, fill=canvas.near((25, 25, 25), 10))
        canvas.disc(x, bottom, 0.4 * radius, fill=(170, 170, 170))
    return canvas.affine(5, 0.1, 2).finish(9, 0, 0.2)


def _windows(canvas: Canvas, left: float, right: float, top: float, bottom: float) -> None:
    glass = canvas.near((190, 215, 230), 20)
    if canvas.rng.integers(2) == 0:
        canvas.box(left, top, right, bottom, glass)
    else:
        middle = (left + right) / 2
        canvas.box(left, top, middle - 2.5, bottom, glass)
        canvas.box(middle + 2.5, top, right, bottom, glass)


ROAD = (150, 150, 150)


def fields(canvas: Canvas) -> None:
    u = canvas.uniform
    for x in (0, 32):
        for y in (0, 32):
            left, top, right, bottom = x + u(0, 4), y + u(0, 4), x + u(27, 32), y + u(27, 32)
            middle, half = (left + right) / 2, (right - left) / 2
            green = canvas.near((70, 140, 60), 30)
            canvas.disc(middle, (top + bottom) / 2, half, (bottom - top) / 2, fill=green)


def runway(canvas: Canvas) -> None:
    u = canvas.uniform
    canvas.line([(0, u(10, 54)), (SIZE, u(10, 54))], canvas.near(ROAD, 20), int(u(7, 12)))


def river(canvas: Canvas) -> None:
    u = canvas.uniform
    bends = [(0, u(10, 54))] + [(16 * bend, u(8, 56)) for bend in range(1, 5)]
    canvas.line(bends, canvas.near((50, 80, 140)), int(u(8, 13)))


def tanks(canvas: Canvas) -> None:
    u = canvas.uniform
    for _ in range(canvas.rng.integers(4, 8)):
        disc = u(6, 58), u(6, 58), u(5, 8)
        canvas.disc(*disc, fill=canvas.near((225, 225, 225), 15), outline=(90, 90, 90))


def crossing(canvas: Canvas) -> None:
    x, y, grey = canvas.uniform(14, 50), canvas.uniform(14, 50), canvas.near(ROAD, 20)
    canvas.line([(0, y), (SIZE, y)], grey, 8)
    canvas.line([(x, 0), (x, SIZE)], grey, 8)


def coast(canvas: Canvas) -> None:
    shore = canvas.uniform(20, 44)
    canvas.box(0, 0, SIZE, shore, canvas.near((50, 100, 150)))
    canvas.box(0, shore, SIZE, shore + canvas.uniform(8, 14), canvas.near((220, 205, 160)))


def residential(canvas: Canvas) -> None:
    u = canvas.uniform
    for x in range(0, SIZE, 16):
        for y in range(0, SIZE, 16):
            roof = ((170, 90, 70), (180, 170, 160))[int(canvas.rng.integers(2))]
            corners = x + u(1, 4), y + u(1, 4), x + u(10, 14), y + u(10, 14)
            canvas.box(*corners, canvas.near(roof, 25))


def forest(canvas: Canvas) -> None:
    u = canvas.uniform
    for _ in range(60):
        canvas.disc(u(0, SIZE), u(0, SIZE), u(3, 6), fill=canvas.near((35, 75, 35), 18))


def island(canvas: Canvas) -> None:
    u = canvas.uniform
    canvas.box(0, 0, SIZE, SIZE, canvas.near((45, 85, 140)))
    shore = regular_polygon(u(24, 40), u(24, 40), u(12, 18), 9)
    canvas.polygon([(x + u(-4, 4), y + u(-4, 4)) for x, y in shore], canvas.near((90, 125, 70)))


def roundabout(canvas: Canvas) -> None:
    x, y, radius = canvas.uniform(26, 38), canvas.uniform(26, 38), canvas.uniform(14, 18)
    grey = canvas.near(ROAD, 20)
    canvas.line([(0, y), (SIZE, y)], grey, 6)
    canvas.line([(x, 0), (x, SIZE)], grey, 6)
    canvas.disc(x, y, radius, fill=grey)
    canvas.disc(x, y, radius - 7, fill=canvas.near((80, 130, 70)))


def stadium(canvas: Canvas) -> None:
    x, y, rx, ry = (canvas.uniform(*ends) for ends in ((26, 38), (26, 38), (20, 26), (13, 17)))
    canvas.disc(x, y, rx, ry, fill=canvas.near((165, 80, 60)))
    canvas.disc(x, y, rx - 7, ry - 6, fill=canvas.near((70, 140, 60)))


def parking(canvas: Canvas) -> None:
    canvas.box(0, 0, SIZE, SIZE, canvas.near((110, 110, 115), 12))
    for x in range(0, SIZE, 16):
        for y in range(0, 66, 11):
            if canvas.rng.random() < 0.7:
                canvas.box(x + 4, y + 2, x + 12, y + 7, any_colour(canvas.rng))


SIGHTS = (
    fields, runway, river, tanks, crossing, coast, residential, forest, island, roundabout, stadium,
    parking,
)  # fmt: skip


def sight(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draw one of twelve sights on plain land, from any direction."""
    land = LANDS[int(rng.integers(3))]
    canvas = Canvas.gradient(rng, near(rng, land), near(rng, land))
    SIGHTS[label](canvas)
    canvas.clutter(2)
    if rng.random() < 0.5:
        canvas.replaced(canvas.image.rotate(90))
    return canvas.affine(25, 0.2, 5).finish(12, rng.uniform(0, 1.3), 0.2)


def stripes(canvas: Canvas, colour, step: int) -> None:
    for x in range(-SIZE, 2 * SIZE, step):
        end = (x + canvas.uniform(8, 12), SIZE)
        canvas.line([(x, 0), end], canvas.near(colour, 40), max(2, step // 2))


def specks(canvas: Canvas, colour, low: float, high: float) -> None:
    u = canvas.uniform
    for _ in range(40):
        canvas.disc(u(0, SIZE), u(0, SIZE), u(low, high), fill=canvas.near(colour))


def band(canvas: Canvas, colour, low: float, high: float) -> None:
    u = canvas.uniform
    canvas.line([(u(0, 30), 0), (u(34, 64), SIZE)], canvas.near(colour), int(u(low, high)))


def blocks(canvas: Canvas, colour, count: int, widths, heights, spread: float) -> None:
    u = canvas.uniform
    for _ in range(count):
        x, y = u(0, SIZE), u(0, SIZE)
        canvas.box(x, y, x + u(*widths), y + u(*heights), canvas.near(colour, spread))


COVERING = {"stripes": stripes, "specks": specks, "band": band, "blocks": blocks}


def land_cover(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draw one of ten kinds of land cover: a ground colour and its texture."""
    ground, *texture = COVERS[label]
    canvas = Canvas.gradient(rng, near(rng, ground, 15), near(rng, ground, 15))
    for draw, *values in texture:
        COVERING[draw](canvas, *values)
    return canvas.affine(30, 0.2, 4).finish(12, rng.uniform(0, 1.2), 0.16)


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

    def offset(self, t: np.ndarray) -> np.ndarray:
        """Return the distance from the middle of the period t falls into."""
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
    lambda w: w.offset(w.u) ** 2 + w.offset(w.v) ** 2 < (0.3 * w.period) ** 2,
    lambda w: np.maximum(np.mod(w.u, w.period) < 2.5, np.mod(w.v, w.period) < 2.5),
    lambda w: w.wave(w.u + 5 * np.sin(2 * math.pi * w.v / w.period / 1.4)),
    concentric,
    lambda w: w.clouds(int(w.rng.integers(7, 11))) > 0.5,
    radial,
    lambda w: (w.rng.random((SIZE // 4, SIZE // 4)) > 0.5).repeat(4, 0).repeat(4, 1),
    lambda w: np.abs(w.clouds(8) - 0.5) < 0.07,
)


def texture(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draw one of ten textures, light on dark in random colours."""
    mask = np.asarray(TEXTURES[label](Weave(rng)), float)[..., None]
    dark, light = np.asarray(any_colour(rng, 10, 100)), np.asarray(any_colour(rng, 150, 245))
    canvas = Canvas(rng, Image.fromarray((dark * (1 - mask) + light * mask).astype(np.uint8)))
    return canvas.finish(10, rng.uniform(0, 1), 0.15)


def tissue(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draw stained tissue; large dark nuclei in the middle, not at the border, make it a tumour."""
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
