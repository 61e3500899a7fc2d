"""Annotations as the check of values: of what public functions are called with, and of settings.

Of a function's arguments only the outermost type is looked at: what a dictionary or a list holds is
for the function to read.
"""

import collections.abc
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, signature
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from featcal.errors import BadSetting, UnknownKey

F = TypeVar("F", bound=Callable[..., Any])
WORDS: dict[Any, str] = {
    collections.abc.Mapping: "a dictionary", collections.abc.Sequence: "a list", collections.abc.Iterable: "a list",
    collections.abc.Callable: "a function", str: "text", int: "a whole number", float: "a finite number", bool: "true or false",
    NoneType: "None",
}  # fmt: skip


@dataclass(frozen=True)
class Within:
    """For Annotated: the numbers that a value may be, between two ends. Strictly: the ends
    themselves may not be.
    """

    low: float = -math.inf
    high: float = math.inf
    strictly: bool = False

    def holds(self, value: float) -> bool:
        return self.low < value < self.high if self.strictly else self.low <= value <= self.high

    def __str__(self) -> str:
        if self.high < math.inf:
            return f", between {self.low:g} and {self.high:g}" + (
                " but neither" if self.strictly else ""
            )
        return (
            ""
            if self.low == -math.inf
            else f", {'above' if self.strictly else 'at least'} {self.low:g}"
        )


def checked(function: F) -> F:
    """The function; a call with other arguments than it has, or of other types, is refused in one
    message.

    Raises: UnknownKey for a keyword it lacks; BadSetting for one that is missing, or is not what
    its annotation says.
    """
    taken, name = signature(function).parameters, function.__name__
    open_ended = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in taken.values())

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        if unknown := [key for key in named if key not in taken and not open_ended]:
            raise UnknownKey(f"featcal.{name}", unknown[0], list(taken))
        try:
            arguments = signature(function).bind(*given, **named).arguments
        except TypeError as error:
            raise BadSetting(
                f"featcal.{name}",
                (*map(shown, given), *named),
                f"does not fit what it takes: {error}",
            ) from None
        hints = get_type_hints(function, include_extras=True)
        for key, value in arguments.items():
            if taken[key].kind is not Parameter.VAR_KEYWORD:
                require_fits(f"{name}.{key}", value, hints[key])
        return function(*given, **named)

    return call  # type: ignore[return-value]


def require_fits(key: str, value: object, hint: Any) -> None:
    """Raise BadSetting unless a value is what an annotation says; of `1e-5`, text to YAML, the
    message says how to write it.
    """
    if not fits(value, hint):
        yaml = (
            " (YAML wants a dot: 1.0e-5, not 1e-5)"
            if isinstance(value, str) and "finite" in words(hint)
            else ""
        )
        raise BadSetting(key, shown(value), f"must be {words(hint)}{yaml}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is what an annotation says, as far as its own type tells; a list is as good
    as a tuple.
    """
    kind, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if kind in (Union, UnionType):
        return any(fits(value, part) for part in parts)
    if kind is Literal:
        return isinstance(value, str) and value in parts
    if kind is Annotated:
        return fits(value, parts[0]) and parts[1].holds(value)
    if kind is tuple:
        fine = isinstance(value, list | tuple) and (
            parts[-1] is Ellipsis or len(value) == len(parts)
        )
        return fine and all(fits(one, parts[0]) for one in value)
    plain = kind or hint
    if isinstance(value, bool) and plain in (int, float):
        return False
    if plain is float:
        return isinstance(value, int | float) and abs(value) < math.inf
    if isinstance(value, str) and plain in (
        str,
        collections.abc.Sequence,
        collections.abc.Iterable,
    ):
        return plain is str and bool(value)
    return not isinstance(plain, type) or isinstance(value, plain)


def words(hint: Any) -> str:
    """An annotation as a message calls it."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType, Literal):
        return " or ".join(
            str(part) if kind is Literal else words(part) for part in parts if part is not NoneType
        )
    if kind is Annotated:
        return f"{words(parts[0])}{parts[1]}"
    if kind is tuple:
        each = words(parts[0])
        return (
            f"a list of {each.removeprefix('a ')}"
            if parts[-1] is Ellipsis
            else f"a list of {len(parts)}, each {each}"
        )
    plain = kind or hint
    return WORDS.get(plain) or f"a {getattr(plain, '__name__', plain)}"


def shown(value: object) -> object:
    """A value as a message shows it: short ones themselves, of all others the type."""
    plain = value is None or isinstance(value, str | int | float | list | tuple | dict)
    return value if plain and len(repr(value)) < 80 else type(value).__name__
