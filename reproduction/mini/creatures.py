"""Draw flowers, faces and pets: the analogues of Oxford Flowers, FER2013 and Oxford-IIIT Pet."""

import math

import numpy as np

from reproduction.mini.canvas import SIZE, Canvas, any_colour, near

PETALS = ((4, 0.5), (7, 0.3), (12, 0.17))  # number, width as a share of the flower's radius
PETAL_COLOURS = ((200, 40, 40), (220, 200, 60), (140, 60, 170), (230, 230, 230))
COATS = ((205, 160, 95), (90, 90, 95), (235, 228, 220), (120, 75, 45))
CHOCOLATE = 3
EYE_HEIGHT = (2.4, 2.4, 4.2, 2.4, 4.2, 2.4, 2.4)  # by emotion, in the order of the class names
BROW_TILT = (3.5, 0, -3, 0, 0, -3.5, 0)


def flower(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a flower: number of petals (label // 4) and their colour (label % 4), among stalks."""
    (petals, width), colour = PETALS[label // 4], PETAL_COLOURS[label % 4]
    green = near(rng, (60, 110, 50), 25)
    canvas = Canvas.gradient(rng, green, near(rng, green, 30))
    for _ in range(rng.integers(2, 6)):
        x, y = rng.uniform(0, SIZE, 2)
        end = (x + rng.normal(0, 15), y + rng.normal(0, 15))
        canvas.line([(x, y), end], canvas.near((40, 80, 35)), 3)
    x, y = 32 + rng.uniform(-5, 5, 2)
    radius, turn, colour = rng.uniform(15, 23), rng.uniform(0, 6.3), canvas.near(colour, 20)
    edge = tuple(int(0.6 * value) for value in colour)
    for petal in range(petals):
        angle = turn + 2 * math.pi * petal / petals
        px, py = x + 0.62 * radius * math.cos(angle), y + 0.62 * radius * math.sin(angle)
        fill, outline = canvas.near(colour, 8), canvas.near(edge, 5)
        canvas.disc(px, py, width * radius, fill=fill, outline=outline)
    canvas.disc(x, y, 0.28 * radius, fill=canvas.near((200, 150, 40), 30))
    return canvas.affine(8, 0.1, 3).finish(12, rng.uniform(0, 1), 0.2)


def face(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a grey face whose eyes, brows and mouth show one of seven emotions."""
    shades = [(int(rng.uniform(*ends)),) * 3 for ends in ((60, 150), (40, 180), (150, 225))]
    canvas, skin = Canvas.gradient(rng, *shades[:2]), shades[2]
    x, y = 32 + rng.uniform(-3, 3, 2)
    canvas.disc(x, y, rng.uniform(18, 23), rng.uniform(23, 28), fill=skin)
    dark = tuple(int(0.25 * value) for value in skin)
    eye_x, eye_y, tilt = rng.uniform(8, 10), y - rng.uniform(5, 8), BROW_TILT[label]
    for side in (-1, 1):
        middle = x + side * eye_x
        canvas.disc(middle, eye_y, 3, EYE_HEIGHT[label], fill=dark)
        ends = (middle - side * 5, eye_y - 8 + tilt), (middle + side * 5, eye_y - 8 - tilt)
        canvas.line(ends, dark, 2)
    _mouth(canvas, label, x, y + rng.uniform(10, 13), rng.uniform(8, 11), dark)
    return canvas.affine(10, 0.12, 3).finish(10, rng.uniform(0.2, 1.3), 0.2)


def _mouth(canvas: Canvas, emotion: int, x: float, y: float, half: float, dark) -> None:
    pen = canvas.pen
    if emotion == 0:  # angry
        canvas.line([(x - half, y + 2), (x + half, y + 2)], dark, 3)
    elif emotion == 1:  # disgusted
        canvas.line([(x - half, y + 3), (x - 3, y - 1), (x + 3, y + 3), (x + half, y - 1)], dark, 3)
    elif emotion == 2:  # fearful
        canvas.disc(x, y + 0.5, 0.8 * half, 3.5, outline=dark, width=2)
    elif emotion == 3:  # happy
        pen.chord([x - half, y - 8, x + half, y + 5], 0, 180, fill=dark)
    elif emotion == 4:  # surprised
        canvas.disc(x, y + 1, 4.5, 5, fill=dark)
    elif emotion == 5:  # sad
        pen.arc([x - half, y - 1, x + half, y + 11], 180, 360, fill=dark, width=3)
    else:  # neutral
        canvas.line([(x - 0.7 * half, y), (x + 0.7 * half, y)], dark, 2)


def pet(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a pet: shape of the ears (label // 4) and colour of the coat (label % 4)."""
    ears, coat = label // 4, label % 4
    canvas = Canvas.gradient(rng, any_colour(rng, 60, 210), any_colour(rng, 60, 210))
    fur = canvas.near(COATS[coat], 14)
    shade = canvas.near(tuple(int(0.75 * value) for value in fur), 10)
    x, y, width, height = 32, 35, rng.uniform(17, 20), rng.uniform(16, 20)
    for side in (-1, 1):
        if ears == 0:
            tip = (x + side * width, y - 1.6 * height)
            inner, outer = x + 0.3 * side * width, x + 0.98 * side * width
            canvas.polygon([(inner, y - 0.7 * height), tip, (outer, y - 0.3 * height)], shade)
        elif ears == 1:
            canvas.disc(x + side * width, y - 0.15 * height, 6, 0.65 * height, fill=shade)
        else:
            canvas.disc(x + 0.7 * side * width, y - 1.25 * height + 1.5, 6, 6.5, fill=shade)
    canvas.disc(x, y, width, height, fill=fur)
    if rng.random() < 0.4:
        canvas.disc(x - 0.45 * width, y - 0.25 * height, 0.35 * width, 0.35 * height, fill=shade)
    for side in (-1, 1):
        canvas.disc(x + 7 * side, y - 2.5, 2.5, fill=(20, 20, 20))
    canvas.disc(x, y + 6, 3, 2, fill=(40, 25, 25))
    if coat == CHOCOLATE or rng.random() < 0.3:
        for side in (-1, 1):
            canvas.line([(x, y + 8), (x + 7 * side, y + 12)], (40, 25, 25), 2)
    return canvas.affine(10, 0.15, 3).finish(10, rng.uniform(0, 1), 0.16)
