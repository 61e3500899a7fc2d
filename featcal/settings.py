"""Settings as frozen pydantic models, checked once when they are read.

Values of experiments stand in params.yaml only; here is what a value may be. Knows nothing of
torch, models or files.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from featcal.errors import BadSetting, MissingPath, UnknownKey

T = TypeVar("T")
SCALARS = ("bool", "int", "float", "str")


def project_root(start: Path | None = None) -> Path:
    """Return the nearest folder at or above `start` (the current folder by default) that holds
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


def each_once(values: Sequence[T]) -> Sequence[T]:
    """Return the values. Raises: ValueError where two are equal."""
    if len(set(values)) < len(values):
        raise ValueError("must name each value once")
    return values


Fraction = Annotated[float, Field(ge=0, le=1)]
Distinct = AfterValidator(each_once)


def _strict(schema: Any) -> Any:
    if isinstance(schema, dict):
        if schema.get("type") in SCALARS:
            schema["strict"] = True
        for part in schema.values():
            _strict(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _strict(part)
    return schema


class Settings(BaseModel):
    """Base of all settings: frozen, without unknown keys, strict about numbers, text and true or
    false. A list becomes a tuple.

    place: the name of the settings in messages, before the name of a field.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)
    place: ClassVar[str] = ""

    def __init__(self, **values: Any):
        """Raises: UnknownKey, with the nearest field; BadSetting naming the field and what it may
        be.
        """
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _refusal(error, values, type(self).place or type(self).__name__) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # nested models report to the outermost

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], place: str) -> Self:
        """Return the settings of a YAML mapping; errors name `place`.

        Raises: UnknownKey with the nearest known key; BadSetting for a missing key or a bad value.
        """
        require(isinstance(mapping, Mapping), place, mapping, "must be a mapping of settings")
        try:
            return cls.model_validate(dict(mapping))
        except ValidationError as error:
            raise _refusal(error, mapping, place) from None

    def but(self, **changes: Any) -> Self:
        """Return the settings with some of them changed, checked anew."""
        return type(self)(**{**dict(self), **changes})

    def check(self) -> None:
        """Raise BadSetting for values that do not go together."""

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, given: Any) -> Any:
        for key in given if isinstance(given, Mapping) else ():
            if key not in cls.model_fields:
                known = list(cls.model_fields)
                raise PydanticCustomError("unknown_key", "unknown", {"key": key, "known": known})
        return given

    @model_validator(mode="after")
    def _together(self) -> Self:
        try:
            self.check()
        except BadSetting as error:
            raise PydanticCustomError(
                "together", "together", {"error": error, "own": self.place}
            ) from None
        return self

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Return pydantic's schema with strict scalars; containers and nested settings stay lax."""
        return _strict(handler(source))


def _refusal(error: ValidationError, given: Any, place: str) -> BadSetting | UnknownKey:
    """Return one error of ours for the first mistake that pydantic found."""
    mistakes = [(*_reached(one["loc"], given), one) for one in error.errors(include_url=False)]
    path, value, first = mistakes[0]
    if path:
        place += (": " if place.endswith(".yaml") else ".") + ".".join(path)
    kind = first["type"]
    if kind == "unknown_key":
        return UnknownKey(place, str(first["ctx"]["key"]), first["ctx"]["known"])
    if kind == "together":
        wrong = first["ctx"]["error"]
        key = wrong.key.removeprefix(f"{first['ctx']['own']}.")
        return BadSetting(f"{place}.{key}", wrong.value, wrong.expected)
    if kind == "missing":
        return BadSetting(place, list(value), f"lacks {first['loc'][-1]}")
    expected = " or ".join(
        dict.fromkeys(
            re.sub(r"^(Value error, |\w+ should )", "", one["msg"]).replace("valid tuple", "list")
            for way, _, one in mistakes
            if way == path
        )
    )
    if "float" in kind and isinstance(value, str):
        expected += " (YAML wants a dot: 1.0e-5, not 1e-5)"
    shown = value if len(repr(value)) < 80 else type(value).__name__
    return BadSetting(place, shown, f"must {expected.removeprefix('must ')}")


def _reached(location: Sequence[Any], value: Any) -> tuple[list[str], Any]:
    """Return the keys of an error's location that lead through the given values, and what is
    there; pydantic also names the options of a union on the way.
    """
    path = []
    for part in location:
        value = dict(value) if isinstance(value, BaseModel) else value
        inside = part in value if isinstance(value, Mapping) else False
        if isinstance(value, list | tuple) and isinstance(part, int):
            inside = part < len(value)
        if inside:
            value = value[part]
            path.append(str(part))
    return path, value


class Calibration(Settings):
    """Settings of a calibration: λ, ρ and α of the paper, by default those for CLIP, and switches
    of the method.

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
    ridge: PositiveFloat = 0.05
    anchor_blend: float = 2.0
    interpolation: Fraction = 0.3
    bias: bool = True
    norm: bool = True
    task_weights: Literal["gram", "uniform"] = "gram"
    order: Literal["forward", "stale", "sites"] = "forward"
    modules: tuple[str, ...] | None = None
    residual: Fraction | tuple[Fraction, Fraction] = 0.0
    affine: Literal["separate", "joint"] = "separate"
    prior: NonNegativeFloat = 0.0

    def check(self) -> None:
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
                bool(names) and all(names),
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
        return cls.from_mapping({**PRESETS[name], **(changed or {})}, "calibrate")

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
        return {name: value for name, value in self if name not in OFF or value != OFF[name]}


BEYOND = ("residual", "affine", "prior")  # the paper's method where at its default
OFF: dict[str, Any] = {name: Calibration.model_fields[name].default for name in BEYOND}


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
