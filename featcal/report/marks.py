"""Names beside the marks of a scatter plot, placed so that they cover neither marks nor each other. Knows no results."""

from collections.abc import Mapping

from matplotlib.axes import Axes

SIZE = 11.0  # of a letter, points
WIDTH = 0.66  # of a letter on average, in sizes
MARK = 6.0  # half the side of a mark, points

Box = tuple[float, float, float, float]  # left, bottom, right, top


def named(axes: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """A name beside each mark, in the first of four corners that is free, or the first of all where none is.

    To be called after the marks are drawn and the margins set.   points: place of each mark in data coordinates.
    """
    axes.autoscale_view()  # places are asked for before anything is drawn
    per_pixel = 72 / axes.figure.dpi  # points are the unit of offsets and letters
    places = {name: axes.transData.transform(point) * per_pixel for name, point in points.items()}
    taken: list[Box] = [(x - MARK, y - MARK, x + MARK, y + MARK) for x, y in places.values()]
    for name, (x, y) in places.items():
        boxes = corners(x, y, WIDTH * SIZE * len(name))
        box = next((box for box in boxes if not any(overlap(box, other) for other in taken)), boxes[0])
        taken.append(box)
        axes.annotate(name, points[name], (box[0] - x, box[1] - y), textcoords="offset points", fontsize=SIZE, va="bottom")


def corners(x: float, y: float, width: float) -> list[Box]:
    """Boxes of one line of text at the upper right, lower right, upper left and lower left of a mark."""
    lefts, bottoms = (x + MARK + 2, x - MARK - 2 - width), (y + MARK - 1, y - MARK + 1 - SIZE)
    return [(left, bottom, left + width, bottom + SIZE) for left in lefts for bottom in bottoms]


def overlap(one: Box, other: Box) -> bool:
    """Whether two boxes share more than an edge."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
