"""Merge methods as pure functions on one tensor, base and experts in, merged out, and the table of what each method takes.

Sums run in float64: a mean of equal experts is that expert to the bit, and the order of the tasks does not matter.
Knows nothing of names, models or files.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from featcal.errors import BadSetting, UnknownKey
from featcal.settings import number


def task_vectors(base: Tensor, experts: Sequence[Tensor]) -> list[Tensor]:
    """τᵢ = θᵢ − θ₀ in float64, one per expert."""
    return [expert.double() - base.double() for expert in experts]


def average(base: Tensor, experts: Sequence[Tensor]) -> Tensor:
    """θ = (1/N) Σ θᵢ; the base has no part in it. Returns: the base's shape and dtype. Source: Wortsman et al., 2022."""
    total = experts[0].double()
    for expert in experts[1:]:
        total = total + expert.double()
    return (total / len(experts)).to(base.dtype)


def task_arithmetic(base: Tensor, experts: Sequence[Tensor], scale: float) -> Tensor:
    """θ = θ₀ + s Σ τᵢ. Returns: the base's shape and dtype. Source: Ilharco et al., 2023; s = 0.3 for eight tasks."""
    total = base.double() * 0
    for vector in task_vectors(base, experts):
        total += vector
    return (base.double() + scale * total).to(base.dtype)


@dataclass(frozen=True)
class Method:
    """One merge method: its function on a tensor, and its scale when none is given (None: it takes no scale)."""

    name: str
    merged: Callable[..., Tensor]
    default_scale: float | None

    def settings(self, scale: float | None, batches: object) -> dict[str, float]:
        """Keyword arguments for `merged`. Raises: BadSetting for a setting that this method does not take."""
        if batches is not None:
            raise BadSetting("merge.batches", "calibration data", f"must be left out: {self.name} uses no data")
        if self.default_scale is None:
            if scale is not None:
                raise BadSetting("merge.scale", scale, f"must be left out: {self.name} has no scale")
            return {}
        number("merge.scale", self.default_scale if scale is None else scale)
        return {"scale": self.default_scale if scale is None else scale}


METHODS = {
    method.name: method
    for method in (
        Method("average", average, default_scale=None),
        Method("task_arithmetic", task_arithmetic, default_scale=0.3),
    )
}


def method_named(name: str) -> Method:
    """The method of that name. Raises: UnknownKey with the nearest name."""
    if name not in METHODS:
        raise UnknownKey("merge.method", str(name), list(METHODS))
    return METHODS[name]
