"""Ten grey garments on black: the analogue of Fashion-MNIST. Order of GARMENTS = class names."""

import numpy as np

from reproduction.mini.canvas import Canvas, Colour

MIDDLE = 32
BLACK = (10, 10, 10)


class Cut:
    """What the pieces of one garment share: shade, half width of the body and how far its sleeves
    stand off.
    """

    def __init__(self, rng: np.random.Generator):
        shade = int(rng.uniform(90, 240))
        self.cloth: Colour = (shade,) * 3
        self.seam: Colour = (int(0.6 * shade),) * 3
        self.half = rng.uniform(11, 15)
        self.sleeve = rng.uniform(0.8, 1.2)


def _body(canvas: Canvas, cut: Cut, top: float, bottom: float, flare: float = 1.0) -> None:
    low = flare * cut.half
    corners = [(-cut.half, top), (cut.half, top), (low, bottom), (-low, bottom)]
    canvas.polygon([(MIDDLE + x, y) for x, y in corners], cut.cloth)


def _sleeves(
    canvas: Canvas, cut: Cut, shoulder: float, out: float, wrist: float, inner: float, armpit: float
) -> None:
    for side in (-1, 1):
        corners = [
            (cut.half, shoulder),
            (cut.half + out * cut.sleeve, wrist),
            (cut.half + inner, wrist + 2),
            (cut.half, armpit),
        ]
        canvas.polygon([(MIDDLE + side * x, y) for x, y in corners], cut.cloth)


def t_shirt(canvas: Canvas, cut: Cut) -> None:
    _body(canvas, cut, 14, 54)
    _sleeves(canvas, cut, 14, 9, 26, 3, 26)


def trouser(canvas: Canvas, cut: Cut) -> None:
    shares = ((-0.8, 8), (0.8, 8), (0.9, 57), (0.2, 57), (0, 22), (-0.2, 57), (-0.9, 57))
    canvas.polygon([(MIDDLE + x * cut.half, y) for x, y in shares], cut.cloth)


def pullover(canvas: Canvas, cut: Cut) -> None:
    _body(canvas, cut, 12, 54)
    _sleeves(canvas, cut, 12, 9, 50, 3, 26)


def dress(canvas: Canvas, cut: Cut) -> None:
    shares = ((-0.6, 8), (0.6, 8), (0.5, 26), (1.2, 57), (-1.2, 57), (-0.5, 26))
    canvas.polygon([(MIDDLE + x * cut.half, y) for x, y in shares], cut.cloth)


def coat(canvas: Canvas, cut: Cut) -> None:
    _body(canvas, cut, 12, 57, flare=1.1)
    _sleeves(canvas, cut, 12, 9, 50, 3, 26)
    canvas.line([(MIDDLE, 12), (MIDDLE, 57)], (20, 20, 20), 2)


def sandal(canvas: Canvas, cut: Cut) -> None:
    canvas.polygon([(8, 44), (52, 44), (56, 50), (8, 50)], cut.cloth)
    canvas.line([(12, 44), (30, 30), (44, 44)], cut.cloth, 3)


def shirt(canvas: Canvas, cut: Cut) -> None:
    _body(canvas, cut, 12, 54)
    _sleeves(canvas, cut, 12, 8, 40, 2, 26)
    canvas.polygon([(MIDDLE - 4, 12), (MIDDLE + 4, 12), (MIDDLE, 22)], BLACK)
    for button in (29, 37, 45):
        canvas.disc(MIDDLE, button, 1, fill=BLACK)


def sneaker(canvas: Canvas, cut: Cut) -> None:
    canvas.polygon([(6, 36), (20, 34), (34, 42), (58, 46), (58, 53), (6, 53)], cut.cloth)
    canvas.box(6, 50, 58, 54, cut.seam)


def bag(canvas: Canvas, cut: Cut) -> None:
    canvas.box(12, 26, 52, 54, cut.cloth)
    canvas.pen.arc([20, 10, 44, 42], 180, 360, fill=cut.cloth, width=3)


def boot(canvas: Canvas, cut: Cut) -> None:
    canvas.polygon([(14, 10), (32, 10), (33, 36), (56, 44), (56, 54), (14, 54)], cut.cloth)
    canvas.box(14, 51, 56, 54, cut.seam)


GARMENTS = (t_shirt, trouser, pullover, dress, coat, sandal, shirt, sneaker, bag, boot)


def garment(label: int, rng: np.random.Generator) -> np.ndarray:
    """One of ten garments, sometimes striped."""
    canvas, cut = Canvas.plain(rng), Cut(rng)
    GARMENTS[label](canvas, cut)
    if rng.random() < 0.4:
        for y in range(16, 54, 6):
            canvas.line([(MIDDLE - cut.half + 1, y), (MIDDLE + cut.half - 1, y)], cut.seam, 1)
    return canvas.affine(7, 0.15, 3).finish(9, rng.uniform(0, 1.2), 0.08)
