"""Settings of one experiment as frozen dataclasses, checked once when they are read.

Values of experiments stand in params.yaml only; here is what a value may be. Knows nothing of torch, models or files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from featcal.errors import BadSetting, MissingPath, UnknownKey

T = TypeVar("T")


def project_root(start: Path | None = None) -> Path:
    """The nearest folder at or above `start` (the current folder by default) that holds params.yaml. Raises: MissingPath."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / "params.yaml").is_file():
            return folder
    raise MissingPath(here / "params.yaml", "the experiments", "start from a folder of the cloned repository")


def require(condition: bool, key: str, value: object, expected: str) -> None:
    """Raise BadSetting unless the condition holds."""
    if not condition:
        raise BadSetting(key, value, expected)


def number(key: str, value: object) -> None:
    """Raise BadSetting unless the value is a finite number; YAML reads `1e-5` as text, so the message says how to write it."""
    fine = isinstance(value, int | float) and not isinstance(value, bool) and value == value and abs(value) != float("inf")
    require(fine, key, value, "must be a finite number (YAML wants a dot: 1.0e-5, not 1e-5)")


def whole_number(key: str, value: object, least: int = 1) -> None:
    """Raise BadSetting unless the value is a whole number, at least `least`; true and false are none."""
    fine = isinstance(value, int) and not isinstance(value, bool) and value >= least
    require(fine, key, value, f"must be a whole number, at least {least}")


def several(key: str, values: object, kind: Any = whole_number, **more: Any) -> None:
    """Raise BadSetting unless the value is a list of different numbers."""
    fine = isinstance(values, Sequence) and not isinstance(values, str) and bool(values)
    require(fine, key, values, "must be a list of numbers")
    assert isinstance(values, Sequence)
    for value in values:
        kind(key, value, **more)
    require(len(set(values)) == len(values), key, values, "must name each number once")


def text(key: str, value: object) -> None:
    """Raise BadSetting unless the value is a word or longer text."""
    require(isinstance(value, str) and bool(value), key, value, "must be text")


def from_mapping(cls: type[T], mapping: Mapping[str, Any], place: str) -> T:
    """A settings object from a YAML mapping; unknown and missing keys are errors that name the place.

    Returns: `cls(**mapping)`. Raises: UnknownKey with the nearest known key; BadSetting for a missing key or a bad value.
    """
    require(isinstance(mapping, Mapping), place, mapping, "must be a mapping of settings")
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    for key in mapping:
        if key not in known:
            raise UnknownKey(place, str(key), list(known))
    for name, f in known.items():
        needed = f.default is MISSING and f.default_factory is MISSING
        require(name in mapping or not needed, place, list(mapping), f"lacks {name}")
    try:
        return cls(**mapping)
    except BadSetting as error:  # the class knows its own name only, and there are many experiments
        raise BadSetting(f"{place}.{error.key.rpartition('.')[-1]}", error.value, error.expected) from None


@dataclass(frozen=True)
class Calibration:
    """How a merged model is calibrated: λ, ρ and α of the paper, by default those for CLIP, and which parts of the method are on.

    ridge:          λ > 0 of Eq. 12, relative to the unit-norm Gram matrices of Eq. 14.
    anchor_blend:   ρ of Eq. 11: 1 is the merged weight, 0 the base weight, above 1 extrapolates away from the base.
    interpolation:  α in [0, 1] of Eq. 10: 0 targets the student's own features, 1 the teacher's.
    bias, norm:     also solve biases (Eq. 55) and LayerNorm scale and shift (Eq. 59).
    task_weights:   "gram" is ω of Eq. 14; "uniform" leaves every task's Gram matrix as it is.
    order:          "forward" looks at the features again after each solved block (Algorithm 1); "stale" uses the merged model's.
    modules:        linears that are solved, by how their names end, such as ("q", "v"); all where None. Norms: see `norm`.
    """

    ridge: float = 0.05
    anchor_blend: float = 2.0
    interpolation: float = 0.3
    bias: bool = True
    norm: bool = True
    task_weights: Literal["gram", "uniform"] = "gram"
    order: Literal["forward", "stale"] = "forward"
    modules: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("ridge", "anchor_blend", "interpolation"):
            number(f"calibrate.{name}", getattr(self, name))
        require(self.ridge > 0, "calibrate.ridge", self.ridge, "must be > 0 (paper: 0.05 for CLIP, 1e-5 for T5)")
        require(0 <= self.interpolation <= 1, "calibrate.interpolation", self.interpolation, "must lie in [0, 1]")
        for name in ("bias", "norm"):
            require(isinstance(getattr(self, name), bool), f"calibrate.{name}", getattr(self, name), "must be true or false")
        require(self.task_weights in ("gram", "uniform"), "calibrate.task_weights", self.task_weights, "must be gram or uniform")
        require(self.order in ("forward", "stale"), "calibrate.order", self.order, "must be forward or stale")
        if self.modules is not None:
            names = self.modules
            fine = isinstance(names, list | tuple) and bool(names) and all(isinstance(n, str) and n for n in names)
            require(fine, "calibrate.modules", names, "must be a list of names such as [q, v]; leave it out for all linears")
            require(len(set(names)) == len(names), "calibrate.modules", names, "must name each kind of linear once")
            object.__setattr__(self, "modules", tuple(names))  # YAML gives a list
