"""The registry of merging methods.

A method is a function under `@method` in featcal/merging/methods/; its settings are its parameters.
"""

from __future__ import annotations  # listing methods loads no torch

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import create_model

from featcal.errors import FeatCalError, UnknownKey
from featcal.merging import methods
from featcal.settings import Settings, require

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from featcal.merging.sources import Tensors
    from featcal.models.batch import TaskBatches

NamedTensors = Iterator[tuple[str, "Tensor"]]
MergeFunction = Callable[..., NamedTensors]  # of (job, **settings)
NEEDS = {"batches": "calibration data (--data)", "head": "zero-shot heads (--head)"}


@dataclass
class MergeJob:
    """One merge as its method sees it; the method yields every tensor of `names` once."""

    base: Tensors
    experts: dict[str, Tensors]  # sorted by task
    structure: Callable[[], nn.Module]  # makes a new module like the base
    batches: TaskBatches = field(default_factory=dict)
    head: Mapping[str, Tensor] = field(default_factory=dict)
    device: torch.device | str = "cpu"
    progress: Callable[[str], None] = lambda line: None
    n_jobs: int = 1  # batches that are answered at the same time
    record: dict[str, Any] = field(default_factory=dict)  # content of merge.json

    @property
    def names(self) -> list[str]:
        """Return the names of the tensors to merge: floating point, not empty, no counters."""
        return [n for n, t in self.base.items() if t.dtype.is_floating_point and 0 not in t.shape]

    def read(self, name: str) -> tuple[Tensor, list[Tensor]]:
        """Return one tensor of the base and of every expert, on the device."""
        experts = [expert[name].finite().to(self.device) for expert in self.experts.values()]
        return self.base[name].finite().to(self.device), experts


@dataclass(frozen=True)
class Method:
    """One merging method."""

    name: str
    run: MergeFunction  # yields the merged tensors
    settings: type[Settings]
    source: str
    needs: tuple[str, ...] = ()  # arguments of `merge` that it requires: batches, head
    scaled: bool = False  # `run` yields task vectors τ in float64 for θ₀ + scale · τ
    note: str = ""  # a remark that belongs to its results

    def check_needs(self, arguments: Mapping[str, object]) -> None:
        """Raise FeatCalError unless batches and head are given exactly if the method uses them."""
        for key, data in NEEDS.items():
            needed, given = key in self.needs, arguments[key] is not None
            expected = f"must be given: {self.name} needs {data} of every task"
            require(given or not needed, f"merge.{key}", None, expected)
            if given and not needed:
                raise FeatCalError(f"merge.{key}", f"{self.name} uses no {data}", "leave it out")


METHODS: dict[str, Method] = {}  # the methods loaded so far


def method(
    *, source: str, needs: tuple[str, ...] = (), scale: float | None = None, note: str = ""
) -> Callable[[MergeFunction], MergeFunction]:
    """Register a function (job, **settings) as a method; scale: default factor of task vectors."""

    def register(run: MergeFunction) -> MergeFunction:
        parameters = list(inspect.signature(run, eval_str=True).parameters.values())[1:]
        fields: dict[str, Any] = {p.name: (p.annotation, p.default) for p in parameters}
        if scale is not None:
            fields["scale"] = (float, scale)
        name = run.__name__
        settings = create_model(f"{name} settings", __base__=Settings, **fields)
        METHODS[name] = Method(name, run, settings, source, needs, scale is not None, note)
        return run

    return register


@cache
def _definitions() -> dict[str, tuple[str, ast.FunctionDef]]:
    """Return file and function of each of the library's own methods, without loading any."""
    definitions = {}
    for file in Path(methods.__path__[0]).glob("*.py"):
        for node in ast.parse(file.read_text("utf-8")).body:
            decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else ()
            if any(ast.unparse(call).startswith("method(") for call in decorators):
                definitions[node.name] = file.stem, node
    return definitions


def method_names() -> list[str]:
    """Return the names of all methods, without loading any."""
    return sorted({*METHODS, *_definitions()})


def method_named(name: object, section: str = "merge") -> Method:
    """Return a method by name. Raises: UnknownKey with the nearest name."""
    if (name := str(name)) not in METHODS:
        if name not in method_names():
            raise UnknownKey(f"{section}.method", name, method_names())
        import_module(f"{methods.__name__}.{_definitions()[name][0]}")
    return METHODS[name]


def settings_of(name: object, values: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Check a method's settings, named `section`, and fill in defaults. Raises: BadSetting."""
    settings = method_named(name, section or "merge").settings
    return dict(settings.from_mapping(values, section or f"merge.{name}"))


def methods_table() -> list[tuple[str, str, str]]:
    """Return name, settings with their defaults, and source of the library's own methods."""
    rows = []
    for name, (_, function) in sorted(_definitions().items()):
        (call,) = function.decorator_list
        assert isinstance(call, ast.Call)
        registered = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        keys = [argument.arg for argument in function.args.args[1:]]
        defaults = [ast.unparse(value).lower().strip("'") for value in function.args.defaults]
        settings = [f"{key}={value}" for key, value in zip(keys, defaults, strict=True)]
        settings += [f"scale={registered['scale']}"] if "scale" in registered else []
        needs = "".join(f"; needs {key}" for key in registered.get("needs", ()))
        rows.append((name, ", ".join(settings), registered["source"] + needs))
    return rows
