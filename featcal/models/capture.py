"""What reaches a module during a forward: all arguments of the first block, the input of each
linear and norm of a block.

Every hook lives in a `with` and is gone afterwards, whatever is raised inside."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.modeling_outputs import BaseModelOutput

from featcal.errors import BadCapture, BadPlan
from featcal.models.plan import Stack, part_of

Arguments = tuple[
    dict[str, Any], ...
]  # by name: of this block, the next, …; the last entry serves all blocks that follow
Features = tuple[
    Tensor, Arguments
]  # hidden states (batch, tokens, d) that reach a block, with its other arguments
Enough = Callable[[], bool]  # whether a forward has done its part


class StopForward(Exception):
    """Raised by a hook where a forward has done its part: at the first block, or at the last input
    asked for.
    """


@contextmanager
def hooked(handles: Sequence[RemovableHandle]) -> Iterator[None]:
    """The hooks are there inside, and gone afterwards."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def model_call(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch on the model's device; a cache of keys and values would make a second pass differ
    from the first.

    For a model whose parameters are not there yet (on meta) the batch must already lie where they
    will be.
    """
    device = next(model.parameters()).device
    there = device.type != "meta"
    call = {
        name: value.to(device) if there and isinstance(value, Tensor) else value
        for name, value in batch.items()
    }
    taken = inspect.signature(model.forward).parameters
    hands_on = getattr(model, "can_generate", bool)() and any(
        one.kind is one.VAR_KEYWORD for one in taken.values()
    )
    return call | {"use_cache": False} if "use_cache" in taken or hands_on else call


def arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a module is called with, by the names its forward gives them, in its order."""
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    named = dict(list(bound.arguments.items())[1:])  # without self
    more = named.pop("kwargs", {})
    return named | more


def first_inputs(
    model: nn.Module, blocks: Sequence[nn.Module], batch: Mapping[str, Any], mixed: bool = False
) -> Features:
    """Hidden states that reach the first block, and every other argument by the name its forward
    gives it.

    The model's own forward runs up to that block and stops. With `mixed` it goes on to the last
    block for the arguments of each, while every block hands its input on unchanged. Raises: BadPlan
    if a block is never reached.
    """
    caught: list[dict[str, Any]] = []
    wanted = len(blocks) if mixed else 1

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.append(arguments(module, args, kwargs))
        if len(caught) == wanted:
            raise StopForward

    handles = [block.register_forward_pre_hook(stop, with_kwargs=True) for block in blocks[:wanted]]
    with (
        suppress(StopForward),
        hooked(handles),
        answering(blocks[: wanted - 1], lambda *args, **kwargs: (*args, *kwargs.values())[0]),
    ):
        model(**model_call(model, batch))
    if len(caught) < wanted:
        raise BadPlan(
            type(model).__name__,
            f"its forward never reaches the {'last' if caught else 'first'} block of the plan",
        )
    hidden = [call.pop(next(iter(call))) for call in caught]
    return hidden[0], tuple(caught)


@contextmanager
def answering(modules: Sequence[nn.Module], answer: Callable[..., Any]) -> Iterator[None]:
    """Inside, the modules answer every call by `answer` instead of computing anything; hooks run as
    ever.
    """
    own = [vars(module).get("forward") for module in modules]
    try:
        for module in modules:
            vars(module)["forward"] = answer
        yield
    finally:
        for module, forward in zip(modules, own, strict=True):
            del vars(module)["forward"]
            if forward is not None:
                vars(module)["forward"] = forward


@contextmanager
def feeding(
    model: nn.Module, source: Stack | None, stack: Stack, result: Tensor | None
) -> Iterator[None]:
    """Inside, the stack before `stack` answers with `result`, which its own entry must then
    receive.

    Nothing happens where no stack feeds this one. Raises: BadPlan if the result does not arrive
    under the plan's keyword.
    """
    if source is None or result is None:
        yield
        return
    entry, arrived = part_of(model, stack.entry), []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arrived.append(arguments(module, args, kwargs).get(source.feeds) is result)

    with (
        entry.register_forward_pre_hook(note, with_kwargs=True),
        answering(
            [part_of(model, source.entry)],
            lambda *_, **__: BaseModelOutput(last_hidden_state=result),
        ),
    ):
        yield
    if not (arrived and all(arrived)):
        problem = (
            f"{stack.entry!r} does not receive what {source.entry!r} puts out as {source.feeds!r}"
        )
        raise BadPlan(type(model).__name__, problem)


def to_its_end() -> bool:
    """The forward goes on whatever has been seen."""
    return False


@contextmanager
def module_inputs(
    block: nn.Module, names: Sequence[str], enough: Enough = to_its_end
) -> Iterator[dict[str, Tensor]]:
    """First positional input of each named module during the next forward of the block.

    The forward ends, and the `with` with it, as soon as an input is seen and `enough` says so; what
    happens to an input behind that point is not seen. Needs `torch.no_grad`, not `inference_mode`:
    the version counters that show overwritten inputs exist in the former only.
    Raises: BadCapture for a module that ran twice, was not seen, or whose input was overwritten in
    place afterwards.
    """
    seen: dict[str, Tensor] = {}
    versions: dict[str, int] = {}

    def note(name: str, args: tuple[Any, ...]) -> None:
        if name in seen:
            raise BadCapture([name], "ran twice in one pass of its block")
        if args and isinstance(args[0], Tensor):
            seen[name], versions[name] = args[0], args[0]._version
        if enough():
            raise StopForward

    handles = [
        block.get_submodule(n).register_forward_pre_hook(lambda _, args, n=n: note(n, args))
        for n in names
    ]
    with suppress(StopForward), hooked(handles):
        yield seen
    if unseen := [name for name in names if name not in seen]:
        raise BadCapture(unseen, "no positional input was seen while the block ran")
    if changed := [name for name in names if seen[name]._version != versions[name]]:
        raise BadCapture(changed, "the input was overwritten in place after the module had read it")


@contextmanager
def module_outputs(
    block: nn.Module, names: Sequence[str], enough: Enough = to_its_end
) -> Iterator[dict[str, Tensor]]:
    """What each named module puts out during the next forward; behind the `with` without what was
    overwritten in place since.

    The forward ends as soon as an output is seen and `enough` says so.
    """
    seen: dict[str, Tensor] = {}
    versions: dict[str, int] = {}

    def note(name: str, output: Tensor) -> None:
        seen[name], versions[name] = output, output._version
        if enough():
            raise StopForward

    handles = [
        block.get_submodule(n).register_forward_hook(lambda _m, _a, out, n=n: note(n, out))
        for n in names
    ]
    with suppress(StopForward), hooked(handles):
        yield seen
    for name in [name for name in seen if seen[name]._version != versions[name]]:
        del seen[name]


@contextmanager
def block_outputs(model: nn.Module, blocks: nn.ModuleList) -> Iterator[dict[str, Tensor]]:
    """Features during the next forward: "embeddings" (what reaches the first block), then "00",
    "01", … (what blocks put out).
    """
    seen: dict[str, Tensor] = {}

    def entering(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen["embeddings"] = (
            args[0] if args else next(v for v in kwargs.values() if torch.is_tensor(v))
        )

    def leaving(name: str, output: Any) -> None:
        if name in seen:
            path = next(
                path for path, module in model.named_modules() if module is blocks[int(name)]
            )
            raise BadCapture(
                [path],
                "this block runs twice in one forward, so one weight would be solved for two inputs",
            )
        seen[name] = output if isinstance(output, Tensor) else output[0]

    handles = [blocks[0].register_forward_pre_hook(entering, with_kwargs=True)]
    handles += [
        b.register_forward_hook(lambda _m, _a, out, n=f"{i:02d}": leaving(n, out))
        for i, b in enumerate(blocks)
    ]
    with hooked(handles):
        yield seen
