"""Settings as frozen pydantic models, checked when they are made.

The values of experiments are in params.yaml; this file says which values are allowed.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from featcal.errors import BadSetting, UnknownKey

T = TypeVar("T")


def require(condition: bool, key: str, value: object, expected: str) -> None:
    """Raise BadSetting unless the condition holds."""
    if not condition:
        raise BadSetting(key, value, expected)


def distinct(values: Sequence[T]) -> Sequence[T]:
    """Return the values. Raises: PydanticCustomError if two are equal."""
    if len(set(values)) < len(values):
        raise PydanticCustomError("twice", "must name each value once")
    return values


Fraction = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
Distinct = pydantic.AfterValidator(distinct)


class Settings(BaseModel):
    """Base class of settings: frozen, no unknown keys, no conversion; `section` is for messages."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)
    section: ClassVar[str] = ""

    def __init__(self, **values: Any):
        """Raises: UnknownKey with the closest field; BadSetting naming the field."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _first_mistake(error, values, self.section or type(self).__name__) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # the outermost model reports

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], section: str) -> Self:
        """Return the settings of a YAML mapping named `section`. Raises: UnknownKey, BadSetting."""
        require(isinstance(mapping, Mapping), section, mapping, "must be a mapping of settings")
        try:
            return cls.model_validate(dict(mapping))
        except ValidationError as error:
            raise _first_mistake(error, mapping, section) from None

    def but(self, **changes: Any) -> Self:
        """Return a copy with some settings changed, checked again."""
        return type(self)(**{**dict(self), **changes})

    def check(self) -> None:
        """Raise BadSetting for values that do not go together."""

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, values: Any) -> Any:
        for key in values if isinstance(values, Mapping) else ():
            if key not in cls.model_fields:
                known = list(cls.model_fields)
                raise PydanticCustomError("unknown_key", "", {"key": key, "known": known})
        return values

    @model_validator(mode="after")
    def _together(self) -> Self:
        try:
            self.check()
        except BadSetting as error:
            context = {"error": error, "key": error.key.removeprefix(f"{self.section}.")}
            raise PydanticCustomError("together", "", context) from None
        return self

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Return pydantic's schema with strict scalars; containers and nested settings are lax."""
        return _strict(handler(source))


def _strict(schema: Any) -> Any:
    if isinstance(schema, dict) and schema.get("type") in ("bool", "int", "float", "str"):
        schema["strict"] = True
    if isinstance(schema, dict | list | tuple):
        for part in schema.values() if isinstance(schema, dict) else schema:
            _strict(part)
    return schema


def _first_mistake(error: ValidationError, raw: Any, section: str) -> BadSetting | UnknownKey:
    """Return our error for the first mistake that pydantic found."""
    mistakes = [(*_locate(entry["loc"], raw), entry) for entry in error.errors(include_url=False)]
    path, value, first = mistakes[0]
    if path:
        section += (": " if section.endswith(".yaml") else ".") + ".".join(path)
    kind, context = first["type"], first.get("ctx", {})
    if kind == "unknown_key":
        return UnknownKey(section, str(context["key"]), context["known"])
    if kind == "together":
        wrong = context["error"]
        return BadSetting(f"{section}.{context['key']}", wrong.value, wrong.expected)
    if kind == "missing":
        return BadSetting(section, list(value), f"lacks {first['loc'][-1]}")
    # one mistake per option of a union
    texts = [entry["msg"] for where, _, entry in mistakes if where == path]
    texts = [text.partition(" should ")[2] or text for text in texts]
    expected = " or ".join(dict.fromkeys(texts)).replace("valid tuple", "list")
    if kind.startswith("byte_size"):
        expected = "be a number of bytes, such as 8GiB"
    if "float" in kind and isinstance(value, str) and value[:1].isdigit():
        expected += " (YAML wants a dot: 1.0e-5, not 1e-5)"
    shown = value if len(repr(value)) < 80 else type(value).__name__
    return BadSetting(section, shown, f"must {expected.removeprefix('must ')}")


def _locate(location: Sequence[Any], value: Any) -> tuple[list[str], Any]:
    """Return the keys of pydantic's location, without a union's options, and the value there."""
    path = []
    for part in location:
        value = dict(value) if isinstance(value, BaseModel) else value
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            continue
        path.append(str(part))
    return path, value


class Calibration(Settings):
    """Settings of a calibration. The defaults are the paper's for CLIP (Section 5.1).

    ridge:          λ > 0 of Eq. 12, relative to the unit-norm Gram matrices of Eq. 14; or "auto":
                    each site chooses its own by halves of the samples (`core/ridge.py`).
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
                    gets the target W_t x_tgt + b_t + αβ (r_t − r), x_tgt as in Eq. 10: at α = β = 1
                    the sum r + y is to be the expert's.
    affine:         "joint" solves weight and bias as one system; "separate" (Eqs. 17 and 55) solves
                    the weight as if targets had no bias, then the bias. Linears without a bias are
                    always "separate".
    """

    section = "calibrate"
    ridge: PositiveFloat | Literal["auto"] = 0.05
    anchor_blend: float = 2.0
    interpolation: Fraction = 0.3
    bias: bool = True
    norm: bool = True
    task_weights: Literal["gram", "uniform"] = "gram"
    order: Literal["forward", "stale", "sites"] = "forward"
    modules: Annotated[tuple[Name, ...], Field(min_length=1), Distinct] | None = None
    residual: Fraction = 0.0
    affine: Literal["separate", "joint"] = "separate"

    def check(self) -> None:
        """Raise BadSetting for affine="joint" without bias, or λ by halves without ω."""
        expected = "solves weight and bias together, so calibrate.bias must be true"
        require(self.bias or self.affine == "separate", "calibrate.affine", self.affine, expected)
        expected = "must be gram with ridge auto, whose λ is relative to Gram matrices of norm 1"
        fits = self.task_weights == "gram" or self.ridge != "auto"
        require(fits, "calibrate.task_weights", self.task_weights, expected)

    @property
    def stated(self) -> dict[str, Any]:
        """Return the settings by name, without those beyond the paper that are off."""
        off = {"residual": 0.0, "affine": "separate"}
        return {name: value for name, value in self if name not in off or value != off[name]}
