"""What a check has found: one number per line, and a few points for plots. Knows no files and no
models.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

ROUNDING = 1e-16  # below it an error is not told apart from none
SHOWN = 4  # points of one statement, task and model that are kept for plots


@dataclass
class Found:
    """Lines (statement, quantity, block, nodes, value, count) and points (statement, index, block,
    actual, bound, kept).

    `digits`: decimal digits that the two sides of an equation share.   `room`: by how many percent
    the larger side of an
    inequality exceeds the smaller one; below 0 it is violated. Both are the worst of `count` cases.
    """

    lines: list[dict[str, Any]] = field(default_factory=list)
    points: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        statement: str,
        quantity: str,
        value: float,
        count: int,
        block: str = "",
        nodes: int | str = "",
    ) -> None:
        line = {"statement": statement, "quantity": quantity, "block": block, "nodes": nodes}
        self.lines.append(line | {"value": float(value), "count": count})

    def exact(self, statement: str, quantity: str, error: Tensor, **where: Any) -> None:
        """An equation: relative errors, one per case. Nothing is added where there is no case."""
        if error.numel():
            self.add(statement, quantity, digits(float(error.max())), error.numel(), **where)

    def bounded(self, statement: str, larger: Tensor, smaller: Tensor) -> None:
        """An inequality `larger ≥ smaller`, case by case: the least room, and the median of smaller
        / larger in percent.
        """
        cases = smaller > 0
        if cases.any():
            ratio = larger[cases] / smaller[cases]
            self.add(statement, "room", 100 * (float(ratio.min()) - 1), len(ratio))
            self.add(statement, "tightness", 100 * float((1 / ratio).median()), len(ratio))

    def show(
        self,
        statement: str,
        actual: Tensor,
        bound: Tensor,
        block: str = "",
        kept: Tensor | None = None,
        most: int = SHOWN,
    ) -> None:
        """Points of a plot, the first `most` of them."""
        for index, (a, b) in enumerate(
            zip(actual[:most].tolist(), bound[:most].tolist(), strict=True)
        ):
            point = {
                "statement": statement,
                "block": block,
                "index": index,
                "actual": float(a),
                "bound": float(b),
            }
            self.points.append(point | {"kept": "" if kept is None else int(kept[index])})


def digits(error: float) -> float:
    """Decimal digits that two numbers share whose relative difference is `error`; 16 at most."""
    return -math.log10(max(error, ROUNDING))


def relative(difference: Tensor, size: Tensor) -> Tensor:
    """Norm of every case's difference over that of its size, (n,); 0 where both vanish."""
    length = norms(size)
    return norms(difference) / length.clamp_min(1e-300)


def norms(x: Tensor) -> Tensor:
    """Euclidean norm of every case, all its tokens and features together: (n, …) to (n,)."""
    return x.flatten(1).norm(dim=1)


def dots(x: Tensor, y: Tensor) -> Tensor:
    """Inner product case by case: (n, …), (n, …) to (n,)."""
    return (x * y).flatten(1).sum(1)
