"""Ten silhouettes around a point (x, y) with a reach r, in one colour and its darker shade. Order =
class names.
"""

import math

from reproduction.mini.canvas import Canvas, Colour, star


def darker(colour: Colour) -> Colour:
    return tuple(int(0.55 * value) for value in colour)


def _block(
    canvas: Canvas, x: float, y: float, half_width: float, half_height: float, colour: Colour
) -> None:
    canvas.box(x - half_width, y - half_height, x + half_width, y + half_height, colour)


def airplane(canvas: Canvas, x, y, r, colour) -> None:
    canvas.disc(x, y, r, 0.2 * r, fill=colour)
    wings = ((-0.2, 0), (-0.5, -0.8), (-0.1, -0.8), (0.35, 0), (-0.1, 0.8), (-0.5, 0.8))
    canvas.polygon([(x + a * r, y + b * r) for a, b in wings], colour)


def bird(canvas: Canvas, x, y, r, colour) -> None:
    canvas.disc(x, y + 0.1 * r, 0.6 * r, 0.4 * r, fill=colour)
    canvas.disc(x + 0.55 * r, y - 0.35 * r, 0.28 * r, fill=colour)
    canvas.polygon(
        [(x + a * r, y + b * r) for a, b in ((0.8, -0.4), (1.1, -0.3), (0.8, -0.2))], darker(colour)
    )
    canvas.polygon(
        [(x + a * r, y + b * r) for a, b in ((-0.5, 0), (-1, -0.3), (-0.9, 0.3))], colour
    )


def car(canvas: Canvas, x, y, r, colour) -> None:
    _block(canvas, x, y + 0.15 * r, r, 0.3 * r, colour)
    _block(canvas, x - 0.05 * r, y - 0.25 * r, 0.55 * r, 0.25 * r, colour)
    for side in (-1, 1):
        canvas.disc(x + 0.55 * side * r, y + 0.5 * r, 0.22 * r, fill=darker(colour))


def cat(canvas: Canvas, x, y, r, colour) -> None:
    canvas.disc(x, y + 0.2 * r, 0.7 * r, 0.55 * r, fill=colour)
    canvas.disc(x, y - 0.4 * r, 0.4 * r, 0.38 * r, fill=colour)
    for side in (-1, 1):
        canvas.polygon(
            [(x + side * a * r, y + b * r) for a, b in ((0.4, -0.5), (0.35, -1), (0.05, -0.7))],
            colour,
        )


def deer(canvas: Canvas, x, y, r, colour) -> None:
    _block(canvas, x, y, 0.7 * r, 0.3 * r, colour)
    for side in (-1, 1):
        _block(canvas, x + 0.5 * side * r, y + 0.6 * r, 0.08 * r, 0.4 * r, colour)
    _block(canvas, x + 0.75 * r, y - 0.45 * r, 0.1 * r, 0.45 * r, colour)
    canvas.polygon(
        [(x + a * r, y + b * r) for a, b in ((0.7, -0.85), (1.1, -0.65), (0.7, -0.5))], colour
    )


def dog(canvas: Canvas, x, y, r, colour) -> None:
    _block(canvas, x, y + 0.1 * r, 0.75 * r, 0.28 * r, colour)
    canvas.disc(x + 0.75 * r, y - 0.1 * r, 0.3 * r, fill=colour)
    for side in (-1, 1):
        _block(canvas, x + 0.5 * side * r, y + 0.6 * r, 0.13 * r, 0.3 * r, colour)
    canvas.line([(x - 0.75 * r, y), (x - r, y - 0.5 * r)], colour, 3)


def ship(canvas: Canvas, x, y, r, colour) -> None:
    canvas.polygon(
        [(x + a * r, y + b * r) for a, b in ((-1, 0.2), (1, 0.2), (0.6, 0.7), (-0.6, 0.7))], colour
    )
    canvas.polygon([(x, y + 0.1 * r), (x, y - r), (x + 0.7 * r, y + 0.1 * r)], darker(colour))


def truck(canvas: Canvas, x, y, r, colour) -> None:
    _block(canvas, x - 0.3 * r, y, 0.65 * r, 0.5 * r, colour)
    _block(canvas, x + 0.65 * r, y + 0.15 * r, 0.3 * r, 0.35 * r, darker(colour))
    for place in (-1, 0, 1):
        canvas.disc(x + 0.6 * place * r, y + 0.6 * r, 0.2 * r, fill=(25, 25, 25))


def five_point_star(canvas: Canvas, x, y, r, colour) -> None:
    canvas.polygon(star(x, y, r, 5, -math.pi / 2), colour)


def house(canvas: Canvas, x, y, r, colour) -> None:
    canvas.polygon(
        [(x + a * r, y + b * r) for a, b in ((-0.8, -0.05), (0, -0.9), (0.8, -0.05))],
        darker(colour),
    )
    _block(canvas, x, y + 0.4 * r, 0.6 * r, 0.45 * r, colour)
    _block(canvas, x, y + 0.55 * r, 0.15 * r, 0.3 * r, darker(colour))


SILHOUETTES = (airplane, bird, car, cat, deer, dog, ship, truck, five_point_star, house)
