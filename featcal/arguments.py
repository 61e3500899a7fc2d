"""The public functions' annotations as the check of what they are called with, once, where a caller comes in.

Only the outermost type is looked at: what a dictionary or a list holds is for the function to read.
"""

import collections.abc
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from featcal.errors import BadSetting, UnknownKey

F = TypeVar("F", bound=Callable[..., Any])
WORDS: dict[Any, str] = {
    collections.abc.Mapping: "a dictionary", collections.abc.Sequence: "a list", collections.abc.Iterable: "a list",
    collections.abc.Callable: "a function", str: "text", int: "a whole number", float: "a number", bool: "True or False",
    NoneType: "None",
}  # fmt: skip


def checked(function: F) -> F:
    """The function; a call with other arguments than it has, or of other types, is refused in one message.

    Raises: UnknownKey for a keyword it lacks; BadSetting for one that is missing, or is not what its annotation says.
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
            raise BadSetting(f"featcal.{name}", None, f"cannot be called so: {error}") from None
        hints = get_type_hints(function, include_extras=True)
        for key, value in arguments.items():
            if taken[key].kind is not Parameter.VAR_KEYWORD and not fits(value, hints[key]):
                raise BadSetting(f"{name}.{key}", shown(value), f"must be {words(hints[key])}")
        return function(*given, **named)

    return call  # type: ignore[return-value]


def fits(value: object, hint: Any) -> bool:
    """Whether a value is what an annotation says, as far as its own type tells."""
    kind, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if kind in (Union, UnionType):
        return any(fits(value, part) for part in parts)
    if kind is Literal:
        return isinstance(value, str) and value in parts
    if kind is Annotated:
        return fits(value, parts[0]) and parts[1].holds(value)
    plain = kind or hint
    if plain is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if plain in (collections.abc.Sequence, collections.abc.Iterable) and isinstance(value, str):
        return False
    return not isinstance(plain, type) or (isinstance(value, plain) and (plain is not int or not isinstance(value, bool)))


def words(hint: Any) -> str:
    """An annotation as a message calls it."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType, Literal):
        return " or ".join(str(part) if kind is Literal else words(part) for part in parts if part is not NoneType)
    if kind is Annotated:
        return f"{words(parts[0])}{parts[1]}"
    plain = kind or hint
    return WORDS.get(plain) or f"a {getattr(plain, '__name__', plain)}"


def shown(value: object) -> object:
    """A value as a message shows it: short ones themselves, of all others the type."""
    return value if isinstance(value, str | int | float | bool) and len(repr(value)) < 80 else type(value).__name__
