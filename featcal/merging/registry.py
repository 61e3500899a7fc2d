"""The merging methods: what a method is given, how it registers, and how its settings are checked.

A method is one file in featcal/merging/methods/, named after it, with a function under `@method`.
The function's parameters after the job are the method's settings.
"""

from __future__ import annotations  # listing methods loads no torch

import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from featcal.errors import BadSetting, UnknownKey
from featcal.merging import methods

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from featcal.merging.sources import Source
    from featcal.models.batch import TaskBatches

Named = tuple[str, "Tensor"]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
Names = Annotated[tuple[str, ...], Field(strict=False)]  # a list from YAML becomes a tuple
NEEDS = {"batches": "calibration data", "head": "zero-shot heads"}


def silent(line: str) -> None:
    """Drop a line of progress."""


@dataclass
class Job:
    """One merge as its method sees it; the method yields every tensor of `names` once."""

    base: Source
    experts: dict[str, Source]  # sorted by task: the order they were given in changes nothing
    structure: Callable[[], nn.Module]  # makes a new module like the base, to run
    batches: TaskBatches = field(default_factory=dict)
    head: Mapping[str, Tensor] = field(default_factory=dict)
    device: torch.device | str = "cpu"
    progress: Callable[[str], None] = silent
    n_jobs: int = 1  # batches that are answered at the same time
    record: dict[str, Any] = field(default_factory=dict)  # what merge.json will hold

    @property
    def names(self) -> list[str]:
        """The tensors to merge: floating point only, no counters."""
        return [name for name in self.base.names if self.base.dtype(name).is_floating_point]

    def read(self, name: str) -> tuple[Tensor, list[Tensor]]:
        """Return one tensor of the base and of every expert, on the device."""
        experts = [expert.finite_tensor(name).to(self.device) for expert in self.experts.values()]
        return self.base.finite_tensor(name).to(self.device), experts


@dataclass(frozen=True)
class Method:
    """One merging method.

    run:       yields the merged tensors; with `scaled`, task vectors τ in float64 instead: the
               merged tensor is then θ₀ + scale · τ.
    settings:  the model that checks the settings.
    needs:     arguments of `merge` it cannot do without: batches, head.
    note:      what a reader of its results must know.
    """

    name: str
    run: Callable[..., Iterator[Named]]
    settings: type[BaseModel]
    source: str
    needs: tuple[str, ...] = ()
    scaled: bool = False
    note: str = ""

    def found(self, job: Job, settings: Mapping[str, Any]) -> Iterator[Named]:
        """Run the method on a job: merged tensors, or task vectors where it is scaled."""
        own = {k: v for k, v in settings.items() if not (self.scaled and k == "scale")}
        return self.run(job, **own)

    def check_needs(self, given: Mapping[str, object]) -> None:
        """Raise BadSetting unless batches and head are given exactly where the method uses them."""
        for key, what in NEEDS.items():
            needed = key in self.needs
            if needed == (given[key] is not None):
                continue
            if needed:
                expected = f"must be given: {self.name} needs {what} of every task"
                raise BadSetting(f"merge.{key}", None, expected)
            raise BadSetting(f"merge.{key}", what, f"must be left out: {self.name} uses none")


METHODS: dict[str, Method] = {}  # the methods loaded so far


def method(
    name: str,
    *,
    source: str,
    needs: tuple[str, ...] = (),
    scale: float | None = None,
    note: str = "",
) -> Callable[[Callable[..., Iterator[Named]]], Callable[..., Iterator[Named]]]:
    """Register a function (job, **settings) as a merging method.

    scale: given for a function that yields task vectors; it becomes the default of a setting
           `scale`, and the merged tensors are θ₀ + scale · τ.
    """

    def register(run: Callable[..., Iterator[Named]]) -> Callable[..., Iterator[Named]]:
        parameters = list(inspect.signature(run, eval_str=True).parameters.values())[1:]
        own: dict[str, Any] = {p.name: (p.annotation, p.default) for p in parameters}
        if scale is not None:
            own["scale"] = (float, scale)
        config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
        settings = create_model(f"{name} settings", __config__=config, **own)
        METHODS[name] = Method(name, run, settings, source, needs, scale is not None, note)
        return run

    return register


def method_names() -> list[str]:
    """Return the names of all methods, without loading any."""
    return sorted({*METHODS, *(file.name for file in pkgutil.iter_modules(methods.__path__))})


def method_named(name: object, place: str = "merge") -> Method:
    """Return a method by name. Raises: UnknownKey with the nearest name."""
    if name not in METHODS:
        if name not in method_names():
            raise UnknownKey(f"{place}.method", str(name), method_names())
        import_module(f"{methods.__name__}.{name}")
    return METHODS[str(name)]


def settings_of(name: object, given: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Check a method's settings and fill in defaults.

    place: where they are from, for messages; default: merge.<method>.
    Raises: UnknownKey for another method or a key it does not take; BadSetting for a value.
    """
    rule = method_named(name, place or "merge")
    place = place or f"merge.{name}"
    try:
        return dict(rule.settings.model_validate(dict(given)))
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            raise UnknownKey(place, key, list(rule.settings.model_fields)) from None
        expected = first["msg"].removeprefix("Input ")
        raise BadSetting(f"{place}.{key}", given[key], expected) from None


def methods_table() -> list[tuple[str, str, str]]:
    """Return name, settings with their defaults, and source of every method."""
    rows = []
    for rule in map(method_named, method_names()):
        settings = (f"{k}={shown(f.default)}" for k, f in rule.settings.model_fields.items())
        needs = "".join(f"; needs {key}" for key in rule.needs)
        rows.append((rule.name, ", ".join(settings), rule.source + needs))
    return rows


def shown(value: Any) -> str:
    """Return a default as the command line takes it; long lists of names shortened."""
    if isinstance(value, tuple) and len(value) > 2:
        return f"[{value[0]}, ...]"
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else f"{value}"
