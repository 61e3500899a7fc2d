"""Draw silhouettes, coloured shapes, dishes, traffic signs, garments, flowers, faces and pets.

The analogues of STL-10 and CIFAR-10 (the same things, clean and cluttered), CIFAR-100, Food-101,
GTSRB, Fashion-MNIST, Oxford Flowers, FER2013 and Oxford-IIIT Pet.
"""

import math
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from reproduction.mini.canvas import SIZE, Canvas, Colour, any_colour, near, regular_polygon, star

PARTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
SILHOUETTES, SYMBOLS, GARMENTS = (list(parts.values()) for parts in PARTS.values())


def draw_parts(canvas: Canvas, parts, x: float, y: float, r: float, colour: Colour) -> None:
    """Draw the parts of a silhouette or symbol around (x, y) with reach r."""
    for kind, *values in parts:
        style, _, form = kind.rpartition(" ")
        dark = tuple(int(0.55 * channel) for channel in colour)
        fill = {"dark": dark, "black": (25, 25, 25)}.get(style, colour)
        if form == "star":
            canvas.polygon(star(x, y, r, UP), fill)
        elif form in ("disc", "box"):
            a, b, width, height = values
            middle, half = (x + a * r, y + b * r), (width * r, height * r)
            if form == "disc":
                canvas.disc(*middle, *half, fill=fill)
            else:
                (left, top), (right, bottom) = np.subtract(middle, half), np.add(middle, half)
                canvas.box(left, top, right, bottom, fill)
        else:
            corners = [(x + a * r, y + b * r) for a, b in values]
            if form == "line":
                canvas.line(corners, fill, 5 if style == "thick" else 3)
            else:
                canvas.polygon(corners, fill)


SHAPE_COLOURS = ((200, 40, 40), (50, 160, 60), (50, 80, 200), (220, 200, 60))
DISHES = ((225, 185, 90), (190, 60, 40), (110, 70, 40), (90, 150, 60))
RING, TRIANGLE = 0, 1  # kinds of traffic sign; the third is a blue disc
UP = -math.pi / 2


def thing(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a large silhouette on a clean background."""
    canvas = Canvas.gradient(rng, any_colour(rng, 90, 240), any_colour(rng, 90, 240))
    draw_parts(canvas, SILHOUETTES[label], 32, 32, rng.uniform(20, 26), any_colour(rng, 10, 150))
    return canvas.maybe_mirrored().affine(12, 0.15, 4).finish(8, 0, 0.15)


def cluttered_thing(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a smaller silhouette, displaced, blurred and among clutter."""
    canvas = Canvas.gradient(rng, any_colour(rng, 110, 240), any_colour(rng, 110, 240))
    canvas.clutter(3)
    x, y = 32 + rng.uniform(-4, 4, 2)
    draw_parts(canvas, SILHOUETTES[label], x, y, rng.uniform(18, 24), any_colour(rng, 0, 110))
    return canvas.maybe_mirrored().affine(15, 0.15, 3).finish(12, rng.uniform(0.5, 2), 0.2)


def coloured_shape(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draw one of five shapes (label // 4) in one of four colours (label % 4)."""
    shape = label // 4
    canvas = Canvas.gradient(rng, any_colour(rng, 40, 220), any_colour(rng, 40, 220))
    canvas.clutter(2)
    x, y = 32 + rng.uniform(-4, 4, 2)
    radius, turn = rng.uniform(18, 23), rng.uniform(0, 6.3)
    colour = canvas.near(SHAPE_COLOURS[label % 4])
    if shape == 0:
        canvas.disc(x, y, radius, fill=colour)
    elif shape == 1:
        canvas.polygon(regular_polygon(x, y, 1.15 * radius, 4, turn), colour)
    elif shape == 2:
        canvas.polygon(regular_polygon(x, y, 1.25 * radius, 3, turn), colour)
    elif shape == 3:
        canvas.polygon(star(x, y, 1.25 * radius, turn), colour)
    else:
        canvas.disc(x, y, radius, outline=colour, width=6)
    return canvas.finish(12, rng.uniform(0.2, 1.2), 0.16)


def dish(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a dish by its colour (label // 3), with berries, strips or crumbs (label % 3)."""
    topping = label % 3
    canvas = Canvas.gradient(rng, any_colour(rng, 60, 200), any_colour(rng, 60, 200))
    x, y = 32 + rng.uniform(-3, 3, 2)
    plate = rng.uniform(24, 28)
    canvas.disc(x, y, plate, fill=canvas.near((235, 232, 225), 12))
    radius = 0.76 * plate
    high = radius * rng.uniform(0.88, 1)
    canvas.disc(x, y, radius, high, fill=canvas.near(DISHES[label // 3], 16))
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
    """Draw a red ring or triangle or a blue disc (label // 6) with one of six symbols (label % 6)."""
    kind = label // 6
    canvas = Canvas.gradient(rng, any_colour(rng, 40, 200), any_colour(rng, 40, 200))
    canvas.clutter(3)
    x, y, radius = 32, 36 if kind == TRIANGLE else 32, rng.uniform(20, 27)
    red, white = canvas.near((195, 35, 40)), canvas.near((235, 235, 230), 10)
    blue = canvas.near((40, 80, 180))
    if kind == RING:
        canvas.disc(x, y, radius, fill=red)
        canvas.disc(x, y, 0.74 * radius, fill=white)
    elif kind == TRIANGLE:
        canvas.polygon(regular_polygon(x, y, 1.2 * radius, 3, UP), red)
        canvas.polygon(regular_polygon(x, y, 0.82 * radius, 3, UP), white)
    else:
        canvas.disc(x, y, radius, fill=blue)
    ink = (20, 20, 20) if kind in (RING, TRIANGLE) else (240, 240, 240)
    reach = radius * (0.34 if kind == TRIANGLE else 0.42)
    draw_parts(canvas, SYMBOLS[label % 6], x, y, reach, ink)
    canvas.affine(10, 0.15, 4)
    daylight = np.clip(np.asarray(canvas.image) * rng.uniform(0.35, 1.1), 0, 255).astype(np.uint8)
    return canvas.replaced(Image.fromarray(daylight)).finish(10, rng.uniform(0, 2.2), 0.1)


MIDDLE = 32


class Garment:
    """A garment being drawn: shades, half width of the body, reach of the sleeves.

    Its methods are the parts of things.yaml.
    """

    def __init__(self, canvas: Canvas):
        rng = canvas.rng
        shade = int(rng.uniform(90, 240))
        self.canvas = canvas
        self.colours: dict[str, Colour] = {
            "cloth": (shade,) * 3, "seam": (int(0.6 * shade),) * 3, "zip": (20, 20, 20),
            "black": (10, 10, 10),
        }  # fmt: skip
        self.half = rng.uniform(11, 15)
        self.sleeve = rng.uniform(0.8, 1.2)

    def shape(self, colour: str, *corners) -> None:
        self.canvas.polygon(corners, self.colours[colour])

    def box(self, colour: str, *corners: float) -> None:
        self.canvas.box(*corners, self.colours[colour])

    def line(self, colour: str, width: int, *points) -> None:
        self.canvas.line(points, self.colours[colour], width)

    def button(self, y: float) -> None:
        self.canvas.disc(MIDDLE, y, 1, fill=self.colours["black"])

    def handle(self, *box: float) -> None:
        self.canvas.pen.arc(list(box), 180, 360, fill=self.colours["cloth"], width=3)

    def flared(self, *corners) -> None:
        """Draw a shape whose x are shares of the half width, from the middle."""
        self.shape("cloth", *((MIDDLE + x * self.half, y) for x, y in corners))

    def body(self, top: float, bottom: float, flare: float = 1.0) -> None:
        low = flare * self.half
        corners = [(-self.half, top), (self.half, top), (low, bottom), (-low, bottom)]
        self.shape("cloth", *((MIDDLE + x, y) for x, y in corners))

    def sleeves(
        self, shoulder: float, out: float, wrist: float, inner: float, armpit: float
    ) -> None:
        half, reach = self.half, self.half + out * self.sleeve
        corners = [(half, shoulder), (reach, wrist), (half + inner, wrist + 2), (half, armpit)]
        for side in (-1, 1):
            self.shape("cloth", *((MIDDLE + side * x, y) for x, y in corners))


def garment(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draw one of ten grey garments on black, sometimes striped."""
    canvas = Canvas.plain(rng)
    piece = Garment(canvas)
    for part, *values in GARMENTS[label]:
        getattr(piece, part)(*values)
    if rng.random() < 0.4:
        for y in range(16, 54, 6):
            left, right = MIDDLE - piece.half + 1, MIDDLE + piece.half - 1
            piece.line("seam", 1, (left, y), (right, y))
    return canvas.affine(7, 0.15, 3).finish(9, rng.uniform(0, 1.2), 0.08)


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
