"""Capture tensors inside a model's forward: a first block's arguments, inputs and outputs of
modules, and the residual streams that outputs are added to.

Every hook lives in a `with` and is removed at its end, whatever is raised inside."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from transformers.modeling_outputs import BaseModelOutput

from featcal.errors import BadCapture, BadPlan
from featcal.models.batch import Batch
from featcal.models.plan import Stack, part_of

# keyword arguments of this block, the next, …; the last entry serves all blocks that follow
Arguments = tuple[dict[str, Any], ...]
# hidden states (batch, tokens, d) that reach a block, with its other arguments
Features = tuple[Tensor, Arguments]
Enough = Callable[[], bool]  # whether a forward may stop


class StopForward(Exception):
    """Raised by a hook to stop a forward that has delivered what was asked for."""


@contextmanager
def hooked(handles: Sequence[RemovableHandle]) -> Iterator[None]:
    """Remove the hooks at the end of the `with`."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def model_call(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return the batch on the model's device, without a cache, which would change a second pass.

    The batch of a model whose parameters are on meta stays where it is.
    """
    device = next(model.parameters()).device
    call = {
        name: value.to(device) if device.type != "meta" and isinstance(value, Tensor) else value
        for name, value in batch.items()
    }
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    generates = getattr(model, "can_generate", bool)()
    if "use_cache" in parameters or (generates and takes_any):
        call["use_cache"] = False
    return call


def arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a module by the names and in the order of its forward."""
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    named = dict(list(bound.arguments.items())[1:])  # without self
    more = named.pop("kwargs", {})
    return named | more


def first_inputs(
    model: nn.Module,
    blocks: Sequence[nn.Module] | nn.ModuleList,
    batch: Batch,
    mixed: bool = False,
) -> Features:
    """Return the hidden states that reach the first block, and its other arguments by name.

    The model's own forward runs up to that block and stops. With `mixed` it goes on for the
    arguments of every block, while blocks pass their input on unchanged.
    Raises: BadPlan if a block is never reached.
    """
    calls: list[dict[str, Any]] = []
    wanted = len(blocks) if mixed else 1

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(arguments(module, args, kwargs))
        if len(calls) == wanted:
            raise StopForward

    def unchanged(*args: Any, **kwargs: Any) -> Any:
        return (*args, *kwargs.values())[0]

    handles = [block.register_forward_pre_hook(stop, with_kwargs=True) for block in blocks[:wanted]]
    passing = [(block, unchanged) for block in blocks[: wanted - 1]]
    with suppress(StopForward), hooked(handles), replaced_forwards(passing):
        model(**model_call(model, batch))
    if len(calls) < wanted:
        problem = f"its forward never reaches the {'last' if calls else 'first'} block of the plan"
        raise BadPlan(type(model).__name__, problem)
    hidden = [call.pop(next(iter(call))) for call in calls]
    return hidden[0], tuple(calls)


@contextmanager
def replaced_forwards(forwards: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Give modules other forwards inside the `with`; their hooks still run."""
    own = [(module, vars(module).get("forward")) for module, _ in forwards]
    try:
        for module, forward in forwards:
            vars(module)["forward"] = forward
        yield
    finally:
        for module, before in own:
            del vars(module)["forward"]
            if before is not None:
                vars(module)["forward"] = before


@contextmanager
def feeding(
    model: nn.Module, source: Stack | None, stack: Stack, result: Tensor | None
) -> Iterator[None]:
    """Let the stack `source` answer with `result`, which the entry of `stack` must then receive.

    Does nothing if no stack feeds this one. Raises: BadPlan if the result does not arrive under the
    plan's keyword.
    """
    if source is None or result is None:
        yield
        return
    arrived = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arrived.append(arguments(module, args, kwargs).get(source.feeds) is result)

    output = BaseModelOutput(last_hidden_state=result)
    hook = part_of(model, stack.entry).register_forward_pre_hook(note, with_kwargs=True)
    answer = part_of(model, source.entry), lambda *_, **__: output
    with hook, replaced_forwards([answer]):
        yield
    if not (arrived and all(arrived)):
        fed = f"what {source.entry!r} puts out as {source.feeds!r}"
        problem = f"{stack.entry!r} does not receive {fed}"
        raise BadPlan(type(model).__name__, problem)


def never() -> bool:
    """Let the forward run to its end."""
    return False


class Captured(dict[str, Tensor]):
    """Tensors by name, with the version each had when it was captured."""

    def __init__(self, enough: Enough = never):
        super().__init__()
        self._versions: dict[str, int] = {}
        self._enough = enough

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor. Raises: StopForward if that is enough."""
        self[name], self._versions[name] = tensor, tensor._version
        if self._enough():
            raise StopForward

    @property
    def overwritten(self) -> list[str]:
        """Return the names of tensors that changed in place since."""
        return [name for name in self if self[name]._version != self._versions[name]]


@contextmanager
def module_inputs(
    block: nn.Module, names: Sequence[str], enough: Enough = never
) -> Iterator[dict[str, Tensor]]:
    """Capture the first positional input of each named module during the next forward of a block.

    The forward, and with it the `with`, ends as soon as an input is captured and `enough` agrees;
    what happens to an input later is not seen. Needs `torch.no_grad`, not `inference_mode`, which
    has no version counters.
    Raises: BadCapture for a module that ran twice, was not seen, or whose input was overwritten.
    """
    inputs = Captured(enough)

    def note(name: str, args: tuple[Any, ...]) -> None:
        if name in inputs:
            raise BadCapture([name], "ran twice in one pass of its block")
        if args and isinstance(args[0], Tensor):
            inputs.add(name, args[0])

    handles = [
        block.get_submodule(n).register_forward_pre_hook(lambda _, args, n=n: note(n, args))
        for n in names
    ]
    with suppress(StopForward), hooked(handles):
        yield inputs
    if unseen := [name for name in names if name not in inputs]:
        raise BadCapture(unseen, "no positional input was seen while the block ran")
    if changed := inputs.overwritten:
        raise BadCapture(changed, "the input was overwritten in place after the module had read it")


@contextmanager
def module_outputs(
    block: nn.Module, names: Sequence[str], enough: Enough = never
) -> Iterator[dict[str, Tensor]]:
    """Capture the output of each named module during the next forward, which ends as above.

    Outputs that were overwritten in place are gone after the `with`.
    """
    outputs = Captured(enough)
    handles = [
        block.get_submodule(n).register_forward_hook(lambda _m, _a, out, n=n: outputs.add(n, out))
        for n in names
    ]
    with suppress(StopForward), hooked(handles):
        yield outputs
    for name in outputs.overwritten:
        del outputs[name]


@contextmanager
def block_outputs(model: nn.Module, blocks: nn.ModuleList) -> Iterator[dict[str, Tensor]]:
    """Capture features during the next forward: "embeddings", what reaches the first block, then
    "00", "01", …, the outputs of the blocks. Raises: BadCapture for a block that runs twice.
    """
    features: dict[str, Tensor] = {}

    def entering(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = (v for v in kwargs.values() if torch.is_tensor(v))
        features["embeddings"] = args[0] if args else next(tensors)

    def leaving(block: nn.Module, name: str, output: Any) -> None:
        if name in features:
            path = next(path for path, module in model.named_modules() if module is block)
            problem = "this block runs twice in one forward, so one weight would be solved twice"
            raise BadCapture([path], problem)
        features[name] = output if isinstance(output, Tensor) else output[0]

    handles = [blocks[0].register_forward_pre_hook(entering, with_kwargs=True)]
    handles += [
        b.register_forward_hook(lambda m, _a, out, n=f"{i:02d}": leaving(m, n, out))
        for i, b in enumerate(blocks)
    ]
    with hooked(handles):
        yield features


ADDITIONS = (torch.Tensor.add, torch.Tensor.add_, torch.add)


class Additions(TorchFunctionMode):
    """While active, capture what some named tensors are added to.

    An addition counts if both tensors have the rows of `like` and exactly one has a name.
    """

    def __init__(self, named: Mapping[str, Tensor], like: Tensor, streams: Captured):
        super().__init__()
        self.named, self.like, self.streams = named, like, streams

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = len(args) == 2 and all(isinstance(each, Tensor) for each in args)
        if func in ADDITIONS and tensors and not kwargs and args[0].shape == args[1].shape:
            names = [self.name(each) for each in args]
            for name, other, others in zip(names, reversed(args), reversed(names), strict=True):
                if name and not others and self.is_stream(other):
                    changes = func is torch.Tensor.add_ and other is args[0]
                    self.streams.add(name, other.clone() if changes else other)
        return func(*args, **(kwargs or {}))

    def is_stream(self, x: Tensor) -> bool:
        """Return whether x has the rows of `like`, as (batch, tokens, d) or (rows, d)."""
        return x.shape[-1:] == self.like.shape[-1:] and x.numel() == self.like.numel()

    def name(self, tensor: Tensor) -> str | None:
        """Return the name of a tensor; an inactive dropout returns the same tensor."""
        return next((name for name, own in self.named.items() if own is tensor), None)


@contextmanager
def residual_streams(
    block: nn.Module, names: Sequence[str], hidden: Tensor, enough: Enough = never
) -> Iterator[dict[str, Tensor]]:
    """Capture the residual streams that outputs of named linears are added to in the next forward.

    Additions are watched, not names of modules, so it works before and after a norm. A linear is
    left out if its output is scaled or normed first, or added to another linear's, or never added
    to something with the rows of `hidden`. The forward ends as in `module_inputs`.
    Raises: BadCapture for a stream that was overwritten in place afterwards.
    """
    streams, outputs = Captured(enough), dict[str, Tensor]()
    handles = [
        block.get_submodule(n).register_forward_hook(
            lambda _m, _a, out, n=n: outputs.update({n: out})
        )
        for n in names
    ]
    with suppress(StopForward), hooked(handles), Additions(outputs, hidden, streams):
        yield streams
    outputs.clear()
    if changed := streams.overwritten:
        raise BadCapture(changed, "the residual stream was overwritten after the addition to it")
