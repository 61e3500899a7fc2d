"""Settings of one experiment as frozen dataclasses, checked once when they are read.

Values of experiments stand in params.yaml only; here is what a value may be. Knows nothing of
torch, models or files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_type_hints

from featcal.arguments import Within, require_fits
from featcal.errors import BadSetting, MissingPath, UnknownKey

T = TypeVar("T")


def project_root(start: Path | None = None) -> Path:
    """The nearest folder at or above `start` (the current folder by default) that holds
    params.yaml. Raises: MissingPath.
    """
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / "params.yaml").is_file():
            return folder
    raise MissingPath(
        here / "params.yaml", "the experiments", "start from a folder of the cloned repository"
    )


def require(condition: bool, key: str, value: object, expected: str) -> None:
    """Raise BadSetting unless the condition holds."""
    if not condition:
        raise BadSetting(key, value, expected)


def number(key: str, value: object) -> None:
    """Raise BadSetting unless the value is a finite number."""
    require_fits(key, value, float)


def whole_number(key: str, value: object, least: int = 1) -> None:
    """Raise BadSetting unless the value is a whole number, at least `least`; true and false are
    none.
    """
    require_fits(key, value, Annotated[int, Within(least)])


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
    require_fits(key, value, str)


def from_mapping(cls: type[T], mapping: Mapping[str, Any], place: str) -> T:
    """A settings object from a YAML mapping; unknown and missing keys are errors that name the
    place.

    Returns: `cls(**mapping)`. Raises: UnknownKey with the nearest known key; BadSetting for a
    missing key or a bad value.
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
        raise BadSetting(
            f"{place}.{error.key.rpartition('.')[-1]}", error.value, error.expected
        ) from None


Count = Annotated[int, Within(1)]
Natural = Annotated[int, Within(0)]  # a seed, or a number of steps that may be none
Share = Annotated[float, Within(0, 1)]
Positive = Annotated[float, Within(0, strictly=True)]


class Checked:
    """A dataclass whose annotations are the check of its values: Literal words, numbers Within
    their ends, lists made tuples.

    place: what messages call the settings, before the name of a field.
    """

    place: ClassVar[str] = ""

    def __new__(cls, *given: Any, **named: Any) -> Self:
        """Raises: UnknownKey for a keyword that is no field."""
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        for key in named:
            if key not in known:
                raise UnknownKey(cls.place or cls.__name__, key, known)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Raises: BadSetting naming the field and what its annotation allows."""
        hints = get_type_hints(type(self), include_extras=True)
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            require_fits(f"{self.place}.{field.name}", value, hints[field.name])
            object.__setattr__(self, field.name, tuple(value) if isinstance(value, list) else value)


@dataclass(frozen=True)
class Calibration(Checked):
    """Settings of a calibration: λ, ρ and α of the paper, by default those for CLIP, and switches of
    the method.

    ridge:          λ > 0 of Eq. 12, relative to the unit-norm Gram matrices of Eq. 14.
    anchor_blend:   ρ of Eq. 11: 1 is the merged weight, 0 the base weight, above 1 extrapolates
                    away from the base.
    interpolation:  α in [0, 1] of Eq. 10: 0 targets the student's own features, 1 the teacher's.
    bias, norm:     also solve biases (Eq. 55) and LayerNorm scale and shift (Eq. 59).
    task_weights:   "gram" is ω of Eq. 14; "uniform" leaves every task's Gram matrix as it is.
    order:          "forward" recomputes the features after each solved block (Algorithm 1);
                    "stale" uses the merged model's.
    modules:        solve only linears whose name ends with one of these, such as ("q", "v").
                    Default: all. Norms: see `norm`.

    Beyond the paper, each off by default:

    order "sites":  solve the sites and norms of a block one after another in forward order, and
                    recompute the student's features after each.
    residual:       β in [0, 1]. A linear whose output y = W x + b is added to the residual stream r
                    gets the target W_t x_t + b_t + β (r_t − r): at β = 1 the sum r + y is to be the
                    expert's. A pair gives β of the first and the last block of a stack, linear in
                    between.
    affine:         "joint" solves weight and bias as one system; "separate" (Eqs. 17 and 55) solves
                    the weight as if targets had no bias, then the bias. Linears without a bias are
                    always "separate".
    prior:          κ ≥ 0, weight of Σ_t ‖(W − W_t) τ_tᵀ‖²/‖τ_t‖² with τ_t = W_t − W_base (WUDI's
                    objective), added to the data term. κ → ∞ gives closed-form WUDI in the span of
                    the task vectors.
    """

    place = "calibrate"
    ridge: Positive = 0.05
    anchor_blend: float = 2.0
    interpolation: Share = 0.3
    bias: bool = True
    norm: bool = True
    task_weights: Literal["gram", "uniform"] = "gram"
    order: Literal["forward", "stale", "sites"] = "forward"
    modules: tuple[str, ...] | None = None
    residual: Share | tuple[Share, Share] = 0.0
    affine: Literal["separate", "joint"] = "separate"
    prior: Annotated[float, Within(0)] = 0.0

    def __post_init__(self) -> None:
        """Raises: BadSetting for a bad value or for settings that exclude each other."""
        super().__post_init__()
        both = self.bias or self.affine == "separate"
        require(
            both,
            "calibrate.affine",
            self.affine,
            "solves weight and bias together, so calibrate.bias must be true",
        )
        if self.modules is not None:
            names = self.modules
            require(
                bool(names),
                "calibrate.modules",
                names,
                "must name some, such as [q, v]; leave it out for all linears",
            )
            require(
                len(set(names)) == len(names),
                "calibrate.modules",
                names,
                "must name each kind of linear once",
            )

    @classmethod
    def preset(cls, name: str, changed: Mapping[str, Any] | None = None) -> "Calibration":
        """Return the settings of a preset with some of them changed. Raises: BadSetting."""
        require(name in PRESETS, "calibrate.preset", name, f"must be {' or '.join(PRESETS)}")
        return from_mapping(cls, {**PRESETS[name], **(changed or {})}, "calibrate")

    @property
    def aims_at_the_stream(self) -> bool:
        """Return whether β > 0 for some block."""
        return self.residual not in (0, (0, 0))

    def residual_at(self, depth: float) -> float:
        """Return β of a block at a depth in its stack; 0 is the first block, 1 the last."""
        first, last = (
            self.residual if isinstance(self.residual, tuple) else (self.residual, self.residual)
        )
        return first + (last - first) * depth

    @property
    def stated(self) -> dict[str, Any]:
        """Return the settings by name, without those beyond the paper that are off."""
        of = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in of.items() if name not in OFF or value != OFF[name]}


BEYOND = ("residual", "affine", "prior")  # the paper's method where at its default
OFF: dict[str, Any] = {f.name: f.default for f in fields(Calibration) if f.name in BEYOND}


# "paper": for CLIP, Section 5.1. "best": of what goes beyond the paper the combination that did
# best on validation samples of
# drawn images, with λ, ρ and α that did best on those and on real texts (scripts/choose_preset.py,
# preset_choice.json).
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"ridge": 0.05, "anchor_blend": 2.0, "interpolation": 0.3},
    "best": {
        "ridge": 1e-4,
        "anchor_blend": 1.0,
        "interpolation": 1.0,
        "residual": 1.0,
        "order": "sites",
        "affine": "joint",
    },
}
