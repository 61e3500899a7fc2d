"""What reaches a module during a forward: all arguments of the first block, the input of each linear and norm of a block.

Every hook lives in a `with` or a `try` and is gone afterwards, whatever is raised inside.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from featcal.errors import BadCapture, BadPlan


class StopForward(Exception):
    """Raised by a hook at the first block, where the model's own forward has done its part."""


def model_call(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch on the model's device; a cache of keys and values would make a second pass differ from the first."""
    device = next(model.parameters()).device
    call = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    return call | {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else call


def first_inputs(model: nn.Module, first: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Hidden states that reach the first block, and every other argument by the name its forward gives it.

    The model's own forward runs up to that block and stops. Raises: BadPlan if the block is never reached.
    """
    caught: dict[str, Any] = {}

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
        caught.update(list(bound.arguments.items())[1:])  # without self
        caught.update(caught.pop("kwargs", {}))
        raise StopForward

    handle = first.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model(**model_call(model, batch))
    except StopForward:
        pass
    finally:
        handle.remove()
    if not caught:
        raise BadPlan(type(model).__name__, "its forward never reaches the first block of the plan")
    hidden = caught.pop(next(iter(caught)))
    return hidden, caught


@contextmanager
def module_inputs(block: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """First positional input of each named module during the next forward of the block.

    Needs `torch.no_grad`, not `inference_mode`: the version counters that show overwritten inputs exist in the former only.
    Raises: BadCapture for a module that ran twice, was not seen, or whose input was overwritten in place afterwards.
    """
    seen: dict[str, Tensor] = {}
    versions: dict[str, int] = {}

    def note(name: str, args: tuple[Any, ...]) -> None:
        if name in seen:
            raise BadCapture([name], "ran twice in one pass of its block")
        if args and isinstance(args[0], Tensor):
            seen[name], versions[name] = args[0], args[0]._version

    handles = [block.get_submodule(n).register_forward_pre_hook(lambda _, args, n=n: note(n, args)) for n in names]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
    if unseen := [name for name in names if name not in seen]:
        raise BadCapture(unseen, "no positional input was seen while the block ran")
    if changed := [name for name in names if seen[name]._version != versions[name]]:
        raise BadCapture(changed, "the input was overwritten in place after the module had read it")


@contextmanager
def block_outputs(model: nn.Module, blocks: nn.ModuleList) -> Iterator[dict[str, Tensor]]:
    """Features during the next forward: "embeddings" (what reaches the first block), then "00", "01", … (what blocks put out)."""
    seen: dict[str, Tensor] = {}

    def entering(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen["embeddings"] = args[0] if args else next(v for v in kwargs.values() if torch.is_tensor(v))

    def leaving(name: str, output: Any) -> None:
        seen[name] = output if isinstance(output, Tensor) else output[0]

    handles = [blocks[0].register_forward_pre_hook(entering, with_kwargs=True)]
    handles += [b.register_forward_hook(lambda _m, _a, out, n=f"{i:02d}": leaving(n, out)) for i, b in enumerate(blocks)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
