"""Marks of a scatter plot: many small ones as one light path, and names beside large ones. Knows no
results.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path

SIZE = 11.0  # of a letter, points
WIDTH = 0.66  # of a letter on average, in sizes
MARK = 6.0  # half the side of a mark, points
AIR = 1.5  # between a name and other names or marks, points
REACHES = (
    0.0,
    9.0,
    18.0,
    30.0,
    45.0,
    60.0,
)  # how far from its mark a name may be, points; beyond the first, a line leads to it
LEADER = {"arrowstyle": "-", "color": "#777777", "lw": 0.7, "shrinkA": 0, "shrinkB": 5}

Box = tuple[float, float, float, float]  # left, bottom, right, top


def specks(
    axes: Axes, x: Sequence[float], y: Sequence[float], diameter: float, **look: Any
) -> None:
    """Round spots as one path of strokes without length: a vector drawing of a few bytes for each.
    diameter: points.
    """
    spots = np.repeat(np.column_stack([x, y]), 2, axis=0)
    path = Path(spots, np.tile([Path.MOVETO, Path.LINETO], len(spots) // 2))
    path.should_simplify = False  # which would drop strokes without length
    axes.add_patch(PathPatch(path, fill=False, lw=diameter, capstyle="round", **look))
    axes.autoscale_view()


def named(
    axes: Axes,
    points: Mapping[str, tuple[float, float]],
    others: Sequence[tuple[float, float]] = (),
) -> None:
    """A name beside each mark, in the nearest place that is free, or in the least covered one where
    none is.

    To be called after the marks are drawn and the margins set.   points, others: marks with a name
    and without.
    """
    axes.autoscale_view()  # places are asked for before anything is drawn
    per_pixel = 72 / axes.figure.dpi  # points are the unit of offsets and letters
    places = {name: axes.transData.transform(point) * per_pixel for name, point in points.items()}
    inside: Box = tuple(axes.transAxes.transform([(0, 0), (1, 1)]).flatten() * per_pixel)
    marks = [*places.values(), *(axes.transData.transform(point) * per_pixel for point in others)]
    taken: list[Box] = [(x - MARK, y - MARK, x + MARK, y + MARK) for x, y in marks]
    for name, (x, y) in places.items():
        boxes = [
            (reach, box)
            for reach in REACHES
            for box in around(x, y, WIDTH * SIZE * len(name), reach)
        ]
        reach, box = min(
            boxes,
            key=lambda one: (
                outside(one[1], inside) + sum(covered(one[1], b) for b in taken),
                one[0],
            ),
        )
        taken.append(box)
        line: dict[str, Any] = {"arrowprops": LEADER} if reach else {}
        axes.annotate(
            name,
            points[name],
            (box[0] - x, box[1] - y),
            textcoords="offset points",
            fontsize=SIZE,
            va="bottom",
            **line,
        )


def around(x: float, y: float, width: float, reach: float = 0.0) -> list[Box]:
    """Boxes of one line of text around a mark: its four corners, then above and below, then to the
    right and left.
    """
    side, middle = MARK + 2 + reach, -width / 2
    low, high = -MARK + 1 - SIZE - reach, MARK - 1 + reach
    corners = [(left, bottom) for left in (side, -side - width) for bottom in (high, low)]
    beside = [(middle, high), (middle, low), (side, -SIZE / 2), (-side - width, -SIZE / 2)]
    return [
        (x + left, y + bottom, x + left + width, y + bottom + SIZE)
        for left, bottom in corners + beside
    ]


def outside(one: Box, frame: Box) -> float:
    """Area of a box that lies outside of the axes."""
    across = max(min(one[2], frame[2]) - max(one[0], frame[0]), 0.0)
    up = max(min(one[3], frame[3]) - max(one[1], frame[1]), 0.0)
    return (one[2] - one[0]) * (one[3] - one[1]) - across * up


def covered(one: Box, other: Box) -> float:
    """Area that two boxes share, with air around the first."""
    across = min(one[2] + AIR, other[2]) - max(one[0] - AIR, other[0])
    up = min(one[3] + AIR, other[3]) - max(one[1] - AIR, other[1])
    return max(across, 0.0) * max(up, 0.0)
