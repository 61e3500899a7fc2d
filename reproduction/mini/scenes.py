"""Landscapes and vehicles: the analogues of SUN397 and Stanford Cars. Each function draws one
picture of one class.
"""

import numpy as np

from reproduction.mini.canvas import SIZE, Canvas, any_colour, near

SKIES = ((120, 170, 235), (70, 60, 80), (235, 150, 90), (190, 195, 200))
GROUNDS = ((60, 130, 60), (40, 90, 160), (205, 185, 130), (235, 238, 240))
THINGS = ((40, 90, 40), (130, 120, 110), (110, 80, 60))
# Where the cabin of a body begins below, begins above, ends above and ends below, as shares of its
# length.
CABINS = (
    (0.2, 0.3, 0.7, 0.85),
    (0.02, 0.06, 0.94, 0.98),
    (0.45, 0.5, 0.85, 0.95),
    (0.3, 0.55, 0.7, 0.8),
)
BUS = 1


def landscape(label: int, rng: np.random.Generator) -> np.ndarray:
    """Sky (label // 4) over ground (label % 4), with trees, houses and hills that mean nothing."""
    sky, ground = SKIES[label // 4], GROUNDS[label % 4]
    canvas = Canvas.gradient(rng, near(rng, sky, 25), near(rng, sky, 25))
    horizon = int(rng.uniform(26, 44))
    canvas.box(0, horizon, SIZE, SIZE, canvas.near(ground))
    for _ in range(rng.integers(1, 5)):
        x, width, kind = rng.uniform(0, SIZE), rng.uniform(5, 14), rng.random()
        colour = canvas.near(THINGS[int(rng.integers(3))], 30)
        if kind < 0.4:
            canvas.polygon(
                [(x - width, horizon + 2), (x, horizon - 1.8 * width), (x + width, horizon + 2)],
                colour,
            )
        elif kind < 0.7:
            canvas.box(x - 0.6 * width, horizon - 1.5 * width, x + 0.6 * width, horizon + 3, colour)
        else:
            canvas.disc(x, horizon - 0.3 * width, width, 0.7 * width, fill=colour)
    for _ in range(rng.integers(2, 8)):
        x, y = rng.uniform(0, SIZE), rng.uniform(horizon, SIZE)
        canvas.line(
            [(x, y), (x + rng.uniform(4, 16), y + rng.normal(0, 2))], canvas.near(ground, 45), 2
        )
    return canvas.finish(14, rng.uniform(0, 1.2), 0.22)


def automobile(label: int, rng: np.random.Generator) -> np.ndarray:
    """Body shape (label // 2) on small or large wheels (label % 2); colour and number of windows
    mean nothing.
    """
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
