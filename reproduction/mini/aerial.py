"""The earth from above: the analogues of RESISC45 (objects on land) and EuroSAT (land cover by
colour and texture).
"""

import numpy as np

from reproduction.mini.canvas import SIZE, Canvas, any_colour, near, regular_polygon

LANDS = ((95, 120, 70), (140, 125, 95), (80, 100, 65))
ROAD = (150, 150, 150)


def fields(canvas: Canvas) -> None:
    u = canvas.uniform
    for x in (0, 32):
        for y in (0, 32):
            left, top, right, bottom = x + u(0, 4), y + u(0, 4), x + u(27, 32), y + u(27, 32)
            green = canvas.near((70, 140, 60), 30)
            canvas.disc(
                (left + right) / 2,
                (top + bottom) / 2,
                (right - left) / 2,
                (bottom - top) / 2,
                fill=green,
            )


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
        canvas.disc(
            u(6, 58), u(6, 58), u(5, 8), fill=canvas.near((225, 225, 225), 15), outline=(90, 90, 90)
        )


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
            canvas.box(
                x + u(1, 4), y + u(1, 4), x + u(10, 14), y + u(10, 14), canvas.near(roof, 25)
            )


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
    fields,
    runway,
    river,
    tanks,
    crossing,
    coast,
    residential,
    forest,
    island,
    roundabout,
    stadium,
    parking,
)


def sight(label: int, rng: np.random.Generator) -> np.ndarray:
    """One of twelve man-made or natural sights on plain land, from any direction."""
    land = LANDS[int(rng.integers(3))]
    canvas = Canvas.gradient(rng, near(rng, land), near(rng, land))
    SIGHTS[label](canvas)
    canvas.clutter(2)
    if rng.random() < 0.5:
        canvas.replaced(canvas.image.rotate(90))
    return canvas.affine(25, 0.2, 5).finish(12, rng.uniform(0, 1.3), 0.2)


def stripes(canvas: Canvas, colour, step: int) -> None:
    for x in range(-SIZE, 2 * SIZE, step):
        canvas.line(
            [(x, 0), (x + canvas.uniform(8, 12), SIZE)], canvas.near(colour, 40), max(2, step // 2)
        )


def specks(canvas: Canvas, colour, low: float, high: float) -> None:
    u = canvas.uniform
    for _ in range(40):
        canvas.disc(u(0, SIZE), u(0, SIZE), u(low, high), fill=canvas.near(colour))


def band(canvas: Canvas, colour, low: float, high: float) -> None:
    u = canvas.uniform
    canvas.line([(u(0, 30), 0), (u(34, 64), SIZE)], canvas.near(colour), int(u(low, high)))


def blocks(canvas: Canvas, colour, count: int, wide, high, spread: float) -> None:
    u = canvas.uniform
    for _ in range(count):
        x, y = u(0, SIZE), u(0, SIZE)
        canvas.box(x, y, x + u(*wide), y + u(*high), canvas.near(colour, spread))


def nothing(canvas: Canvas) -> None:
    """Water has no texture."""


COVERS = (
    ((165, 140, 80), lambda canvas: stripes(canvas, (165, 140, 80), 11)),
    ((40, 75, 45), lambda canvas: specks(canvas, (40, 75, 45), 3, 6)),
    ((110, 130, 75), lambda canvas: specks(canvas, (110, 130, 75), 1, 3)),
    ((120, 120, 110), lambda canvas: band(canvas, (190, 190, 190), 4, 7)),
    ((165, 160, 160), lambda canvas: blocks(canvas, (215, 215, 220), 6, (8, 20), (8, 16), 22)),
    ((95, 150, 80), lambda canvas: blocks(canvas, (95, 150, 80), 3, (10, 30), (10, 30), 18)),
    ((140, 150, 70), lambda canvas: stripes(canvas, (140, 150, 70), 5)),
    ((150, 125, 110), lambda canvas: blocks(canvas, (170, 110, 95), 26, (3, 6), (3, 6), 35)),
    ((85, 100, 90), lambda canvas: band(canvas, (45, 70, 120), 8, 12)),
    ((35, 55, 110), nothing),
)


def land_cover(label: int, rng: np.random.Generator) -> np.ndarray:
    """One of ten kinds of land cover: a ground colour and its texture."""
    ground, texture = COVERS[label]
    canvas = Canvas.gradient(rng, near(rng, ground, 15), near(rng, ground, 15))
    texture(canvas)
    return canvas.affine(30, 0.2, 4).finish(12, rng.uniform(0, 1.2), 0.16)
