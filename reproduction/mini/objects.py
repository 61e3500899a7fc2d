"""Ten things in silhouette, coloured shapes, dishes and traffic signs.

The analogues of STL-10 and CIFAR-10 (same things, clean and cluttered), CIFAR-100, Food-101 and
GTSRB.
"""

import math

import numpy as np
from PIL import Image

from reproduction.mini.canvas import Canvas, any_colour, near, regular_polygon, star
from reproduction.mini.silhouettes import SILHOUETTES

SHAPE_COLOURS = ((200, 40, 40), (50, 160, 60), (50, 80, 200), (220, 200, 60))
DISHES = ((225, 185, 90), (190, 60, 40), (110, 70, 40), (90, 150, 60))
RING, TRIANGLE = 0, 1  # kinds of traffic sign; the third is a blue disc
UP = -math.pi / 2


def thing(label: int, rng: np.random.Generator) -> np.ndarray:
    """A large silhouette on a clean background."""
    canvas = Canvas.gradient(rng, any_colour(rng, 90, 240), any_colour(rng, 90, 240))
    SILHOUETTES[label](canvas, 32, 32, rng.uniform(20, 26), any_colour(rng, 10, 150))
    return canvas.maybe_mirrored().affine(12, 0.15, 4).finish(8, 0, 0.15)


def cluttered_thing(label: int, rng: np.random.Generator) -> np.ndarray:
    """The same silhouettes smaller, displaced, blurred and among clutter."""
    canvas = Canvas.gradient(rng, any_colour(rng, 110, 240), any_colour(rng, 110, 240))
    canvas.clutter(3)
    x, y = 32 + rng.uniform(-4, 4, 2)
    SILHOUETTES[label](canvas, x, y, rng.uniform(18, 24), any_colour(rng, 0, 110))
    return canvas.maybe_mirrored().affine(15, 0.15, 3).finish(12, rng.uniform(0.5, 2), 0.2)


def coloured_shape(label: int, rng: np.random.Generator) -> np.ndarray:
    """One of five shapes (label // 4) in one of four colours (label % 4)."""
    shape = label // 4
    canvas = Canvas.gradient(rng, any_colour(rng, 40, 220), any_colour(rng, 40, 220))
    canvas.clutter(2)
    x, y = 32 + rng.uniform(-4, 4, 2)
    radius, turn, colour = (
        rng.uniform(18, 23),
        rng.uniform(0, 6.3),
        canvas.near(SHAPE_COLOURS[label % 4]),
    )
    if shape == 0:
        canvas.disc(x, y, radius, fill=colour)
    elif shape == 1:
        canvas.polygon(regular_polygon(x, y, 1.15 * radius, 4, turn), colour)
    elif shape == 2:
        canvas.polygon(regular_polygon(x, y, 1.25 * radius, 3, turn), colour)
    elif shape == 3:
        canvas.polygon(star(x, y, 1.25 * radius, 5, turn), colour)
    else:
        canvas.disc(x, y, radius, outline=colour, width=6)
    return canvas.finish(12, rng.uniform(0.2, 1.2), 0.16)


def dish(label: int, rng: np.random.Generator) -> np.ndarray:
    """A dish by its colour (label // 3) with berries, strips or crumbs on it (label % 3)."""
    topping = label % 3
    canvas = Canvas.gradient(rng, any_colour(rng, 60, 200), any_colour(rng, 60, 200))
    x, y = 32 + rng.uniform(-3, 3, 2)
    plate = rng.uniform(24, 28)
    canvas.disc(x, y, plate, fill=canvas.near((235, 232, 225), 12))
    radius = 0.76 * plate
    canvas.disc(
        x, y, radius, radius * rng.uniform(0.88, 1), fill=canvas.near(DISHES[label // 3], 16)
    )
    for _ in range(rng.integers(7, 12)):
        angle, reach = rng.uniform(0, 6.3), 0.75 * radius * math.sqrt(rng.random())
        px, py = x + reach * math.cos(angle), y + reach * math.sin(angle)
        colour = any_colour(rng, *((190, 250), (5, 60), (5, 250))[topping])
        if topping == 0:
            canvas.disc(px, py, 4, fill=colour)
        elif topping == 1:
            lean = rng.uniform(0, 3.1)
            dx, dy = 7 * math.cos(lean), 7 * math.sin(lean)
            canvas.line([(px - dx, py - dy), (px + dx, py + dy)], colour, 2)
        else:
            canvas.box(px - 1.2, py - 1.2, px + 1.2, py + 1.2, colour)
    return canvas.finish(12, rng.uniform(0, 1.2), 0.2)


def traffic_sign(label: int, rng: np.random.Generator) -> np.ndarray:
    """Red ring, red triangle or blue disc (label // 6) with one of six symbols (label % 6), by day
    or night.
    """
    kind = label // 6
    canvas = Canvas.gradient(rng, any_colour(rng, 40, 200), any_colour(rng, 40, 200))
    canvas.clutter(3)
    x, y, radius = 32, 36 if kind == TRIANGLE else 32, rng.uniform(20, 27)
    red, white, blue = (
        near(rng, (195, 35, 40)),
        near(rng, (235, 235, 230), 10),
        near(rng, (40, 80, 180)),
    )
    if kind == RING:
        canvas.disc(x, y, radius, fill=red)
        canvas.disc(x, y, 0.74 * radius, fill=white)
    elif kind == TRIANGLE:
        canvas.polygon(regular_polygon(x, y, 1.2 * radius, 3, UP), red)
        canvas.polygon(regular_polygon(x, y, 0.82 * radius, 3, UP), white)
    else:
        canvas.disc(x, y, radius, fill=blue)
    ink = (20, 20, 20) if kind in (RING, TRIANGLE) else (240, 240, 240)
    _symbol(canvas, label % 6, x, y, radius * (0.34 if kind == TRIANGLE else 0.42), ink)
    canvas.affine(10, 0.15, 4)
    daylight = np.clip(np.asarray(canvas.image) * rng.uniform(0.35, 1.1), 0, 255).astype(np.uint8)
    return canvas.replaced(Image.fromarray(daylight)).finish(10, rng.uniform(0, 2.2), 0.1)


def _symbol(canvas: Canvas, symbol: int, x: float, y: float, k: float, ink) -> None:
    if symbol == 0:
        canvas.box(x - 0.3 * k, y - k, x + 0.3 * k, y + k, ink)
    elif symbol == 1:
        canvas.box(x - k, y - 0.3 * k, x + k, y + 0.3 * k, ink)
    elif symbol == 2:
        canvas.polygon([(x - k, y + k), (x, y - k), (x + k, y + k)], ink)
    elif symbol == 3:
        canvas.disc(x, y, 0.8 * k, fill=ink)
    elif symbol == 4:
        canvas.line([(x - k, y - k), (x + k, y + k)], ink, 5)
        canvas.line([(x - k, y + k), (x + k, y - k)], ink, 5)
    else:
        for side in (-1, 1):
            canvas.disc(x + 0.55 * side * k, y + 0.05 * k, 0.45 * k, fill=ink)
