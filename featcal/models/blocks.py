"""Run a model's blocks one by one, and capture tensors inside a forward.

Every hook lives in a `with` and is removed at its end, whatever is raised inside. Activations that
transformers writes as several operations run in place: the same bits, with less memory.
"""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from transformers import Cache
from transformers.activations import NewGELUActivation, QuickGELUActivation
from transformers.modeling_outputs import BaseModelOutput

from featcal.errors import BadCapture, BadPlan, one_line
from featcal.models.modules import ROUNDING, same_unpacked
from featcal.models.plan import CHOOSE_BLOCKS, BlockPlan, Stack, blocks_of, part_of

# keyword arguments of this block, the next, …; the last entry serves all blocks that follow
Arguments = tuple[dict[str, Any], ...]
# hidden states (batch, tokens, d) that reach a block, with its other arguments
Features = tuple[Tensor, Arguments]
Enough = Callable[[], bool]  # whether a forward may stop


class StopForward(Exception):
    """Stop a forward from a hook, once it has delivered all that is needed."""


def hooked(handles: Sequence[RemovableHandle]) -> ExitStack:
    """Remove the hooks at the end of the `with`."""
    hooks = ExitStack()
    for handle in handles:
        hooks.enter_context(handle)
    return hooks


def output_hooks(module: nn.Module, names: Iterable[str], note: Callable[..., Any]) -> ExitStack:
    """Call `note` with name and output of each named module; a result replaces the output."""
    modules = ((n, module.get_submodule(n)) for n in names)
    handles = [m.register_forward_hook(lambda _m, _a, out, n=n: note(n, out)) for n, m in modules]
    return hooked(handles)


@contextmanager
def replaced_forwards(forwards: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Give modules other forwards inside the `with`; their hooks still run."""
    replaced = [(module, vars(module).get("forward")) for module, _ in forwards]
    try:
        for module, forward in forwards:
            vars(module)["forward"] = forward
        yield
    finally:
        for module, before in replaced:
            del vars(module)["forward"]
            if before is not None:
                vars(module)["forward"] = before


def nbytes(nest: object) -> int:
    """Return the bytes of all tensors in a nest of containers, shared memory counted once."""
    storages = [leaf.untyped_storage() for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@contextmanager
def refusals(error_of: Callable[[str], Exception]) -> Iterator[None]:
    """Raise a model's errors, but for lack of memory, as what `error_of` makes of their text."""
    try:
        yield
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if "memory" in f"{type(error).__name__} {error}".lower():
            raise
        raise error_of(one_line(error)) from error


def model_call(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch on the model's device, without a cache, which would change a second pass."""
    device, call = next(model.parameters()).device, dict(batch)
    if device.type != "meta":
        call |= {name: x.to(device) for name, x in batch.items() if isinstance(x, Tensor)}
    parameters = inspect.signature(model.forward).parameters
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "use_cache" in parameters or (any_keyword and getattr(model, "can_generate", bool)()):
        call["use_cache"] = False
    as_tuple = getattr(getattr(model, "config", None), "return_dict", True) is False
    if as_tuple and (any_keyword or "return_dict" in parameters):
        call["return_dict"] = True
    return call


def arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names and in the order of the module's forward."""
    module = getattr(module, "_orig_mod", module)  # of torch.compile
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    bound.pop(next(iter(bound)))  # self
    extra = bound.pop("kwargs", {})
    # some models always make a cache, which a second pass would read
    return {n: None if isinstance(x, Cache) else x for n, x in (bound | extra).items()}


def first_inputs(
    model: nn.Module,
    stack: Stack,
    batch: Mapping[str, Any],
    source: Stack | None = None,
    fed: Tensor | None = None,
) -> Features:
    """Return the hidden states that reach a stack's first block, and its other arguments by name.

    The model's own forward stops at that block; with `mixed`, at the last one, while blocks pass
    their input on. `fed` replaces running `source`, where one feeds this stack. Raises: BadPlan.
    """
    calls, arrived = list[dict[str, Any]](), list[bool]()
    blocks, name = blocks_of(model, stack), type(model).__name__
    wanted = len(blocks) if stack.mixed else 1

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(arguments(module, args, kwargs))
        if len(calls) == wanted:
            raise StopForward

    handles = [block.register_forward_pre_hook(stop, with_kwargs=True) for block in blocks[:wanted]]
    forwards: list[Any] = [(b, lambda *x, **y: (*x, *y.values())[0]) for b in blocks[: wanted - 1]]
    if source is not None:
        feeds, output = source.feeds, BaseModelOutput(last_hidden_state=fed)

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arrived.append(arguments(module, args, kwargs).get(feeds) is fed)

        forwards.append((part_of(model, source.entry), lambda *_, **__: output))
        entry = part_of(model, stack.entry)
        handles.append(entry.register_forward_pre_hook(note, with_kwargs=True))
    with suppress(StopForward), hooked(handles), replaced_forwards(forwards):
        model(**model_call(model, batch))
    if source is not None and not (arrived and all(arrived)):
        handed = f"what {source.entry!r} puts out as {source.feeds!r}"
        raise BadPlan(name, f"{stack.entry!r} does not receive {handed}")
    if len(calls) < wanted:
        which = "last" if calls else "first"
        raise BadPlan(name, f"its forward never reaches the {which} block of the plan")
    hidden = [call.pop(next(iter(call))) for call in calls]
    return hidden[0], tuple(calls)


def quick_gelu(x: Tensor) -> Tensor:
    """Return x σ(1.702 x), CLIP's activation."""
    return (x * 1.702).sigmoid_().mul_(x)


def new_gelu(x: Tensor) -> Tensor:
    """Return ½ x (1 + tanh(√(2/π) (x + 0.044715 x³))), the activation of T5 and GPT-2."""
    inner = torch.pow(x, 3.0).mul_(0.044715).add_(x).mul_(math.sqrt(2.0 / math.pi))
    return inner.tanh_().add_(1.0).mul_(0.5 * x)


IN_PLACE: Any = {QuickGELUActivation: quick_gelu, NewGELUActivation: new_gelu}


def in_place(block: nn.Module) -> AbstractContextManager[None]:
    """Run a block's activations in place inside the `with`, unless gradients are needed."""
    modules = [] if torch.is_grad_enabled() else block.modules()
    activations = [m for m in modules if type(m) in IN_PLACE and "forward" not in vars(m)]
    return replaced_forwards([(module, IN_PLACE[type(module)]) for module in activations])


def step(block: nn.Module, stack: Stack, hidden: Tensor, arguments: Arguments) -> Features:
    """Run one block; return its output and the following blocks' arguments. Raises: BadCapture."""
    version = hidden._version
    with in_place(block):
        out = block(hidden, **arguments[0])
    if hidden._version != version:
        raise BadCapture([type(block).__name__], "the block overwrites its own input in place")
    following = arguments[1:] or arguments
    if isinstance(out, Tensor):
        return out, following
    carried = {name: out[index] for index, name in stack.carry.items()}
    return out[0], tuple(call | carried for call in following)


def stack_output(model: nn.Module, stack: Stack, hidden: Tensor) -> Tensor:
    """Return what a stack feeds to the next one, from its last block's output."""
    return part_of(model, stack.exit)(hidden) if stack.exit else hidden


def replay(model: nn.Module, plan: BlockPlan, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return every stack's last output: the model's own forward to block 0, then block by block."""
    result, outputs = None, {}
    for source, stack in plan.in_order:
        hidden, arguments = first_inputs(model, stack, batch, source, result)
        for block in blocks_of(model, stack):
            hidden, arguments = step(block, stack, hidden, arguments)
        outputs[stack.name] = hidden
        result = stack_output(model, stack, hidden) if stack.feeds else None
    return outputs


def check_replay(model: nn.Module, plan: BlockPlan, batch: Mapping[str, Any]) -> None:
    """Raise BadPlan unless replaying every stack's blocks equals the model's own forward."""
    name = type(model).__name__
    with torch.no_grad():
        with last_outputs(model, plan, once=True) as outputs, same_unpacked(model):
            model(**model_call(model, batch))
        problem = "its blocks cannot be run one by one"
        with refusals(lambda text: BadPlan(name, f"{problem} ({text})", CHOOSE_BLOCKS)):
            replayed = replay(model, plan, batch)
    for stack in plan.stacks:
        if (out := outputs.get(stack.name)) is None:
            raise BadPlan(name, f"its forward never reaches the last block of {stack.blocks!r}")
        if not out.isfinite().all():
            raise ValueError(f"the output of {stack.blocks!r} is NaN or infinite")
        if out.dim() > 3:
            problem = f"blocks of {stack.blocks!r} put out {[*out.shape]}, not (batch, tokens, d)"
            raise BadPlan(name, problem, CHOOSE_BLOCKS)
        difference = float((replayed[stack.name] - out).abs().max())
        if not difference <= ROUNDING * float(out.abs().max()):
            by = f"the model's own forward by {difference:.3g}"
            way_out = f"the blocks exchange something a block plan cannot express; {CHOOSE_BLOCKS}"
            raise BadPlan(name, f"replaying {stack.blocks!r} differs from {by}", way_out)


class Captured(dict[str, Tensor]):
    """Tensors by name, with the version each had when it was captured."""

    def __init__(self, enough: Enough | None):
        super().__init__()
        self.scales: dict[str, Tensor] = {}  # γ (d,) of linears whose output is scaled before a sum
        self._versions: dict[str, int] = {}
        self._enough = enough

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor. Raises: StopForward if that is enough."""
        self[name], self._versions[name] = tensor, tensor._version
        if self._enough and self._enough():
            raise StopForward

    @property
    def overwritten(self) -> list[str]:
        """Return the names of tensors that changed in place since."""
        return [name for name in self if self[name]._version != self._versions[name]]


@contextmanager
def module_inputs(
    block: nn.Module,
    names: Sequence[str],
    enough: Enough | None = None,
    others: Collection[str] = (),
) -> Iterator[dict[str, Tensor]]:
    """Capture the first positional input of each named module in the next forward of a block.

    The `with` ends once `enough` agrees. others: modules that may also run twice or not at all.
    Raises: BadCapture for an input of `names` that is unseen, seen twice or overwritten.
    """
    inputs = Captured(enough)

    def note(name: str, args: tuple[Any, ...]) -> None:
        if name in inputs and name in names:
            raise BadCapture([name], "ran twice in one pass of its block")
        if name not in inputs and args and isinstance(args[0], Tensor):
            inputs.add(name, args[0])

    modules = ((n, block.get_submodule(n)) for n in [*names, *others])
    handles = [m.register_forward_pre_hook(lambda _, args, n=n: note(n, args)) for n, m in modules]
    with suppress(StopForward), hooked(handles):
        yield inputs
    if unseen := [name for name in names if name not in inputs]:
        raise BadCapture(unseen, "no positional input was seen while the block ran")
    if changed := [name for name in inputs.overwritten if name in names]:
        raise BadCapture(changed, "the input was overwritten in place after the module had read it")


@contextmanager
def module_outputs(
    block: nn.Module, names: Sequence[str], enough: Enough | None = None
) -> Iterator[dict[str, Tensor]]:
    """Capture each named module's output in the next forward, unless it is overwritten in place."""
    outputs = Captured(enough)
    with suppress(StopForward), output_hooks(block, names, outputs.add):
        yield outputs
    for name in outputs.overwritten:
        del outputs[name]


@contextmanager
def last_outputs(
    model: nn.Module, plan: BlockPlan, stop: bool = False, once: bool = False
) -> Iterator[dict[str, Tensor]]:
    """Capture the output (batch, tokens, d) of each stack's last block, then `stop` the forward.

    Raises: BadPlan for a block that runs twice, if each may run only `once`.
    """
    outputs: dict[str, Tensor] = {}
    names = {f"{s.blocks}.{len(blocks_of(model, s)) - 1}": s.name for s in plan.stacks}

    def note(path: str, output: Any) -> None:
        if once and names[path] in outputs:
            raise BadPlan(path, "runs twice in one forward", "it can be merged, but not calibrated")
        outputs[names[path]] = output if isinstance(output, Tensor) else output[0]
        if stop and len(outputs) == len(names):
            raise StopForward

    with suppress(StopForward), output_hooks(model, names, note):
        yield outputs


class Additions(TorchFunctionMode):
    """Capture the tensors to which the outputs of named linears, scaled or not, are added.

    An addition counts if both tensors have the rows of `like` and only one is a named output.
    """

    ADD = (torch.Tensor.add, torch.Tensor.add_, torch.add)
    SCALE = (torch.Tensor.mul, torch.mul)

    def __init__(self, like: Tensor, scales: Mapping[str, Tensor], enough: Enough | None):
        super().__init__()
        self.like, self.scales, self.streams = like, scales, Captured(enough)
        self.outputs: dict[str, Tensor] = {}
        self.scaled: dict[str, tuple[Tensor, Tensor]] = {}  # γ y and γ

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        two = len(args) == 2 and not kwargs
        tensors = two and all(isinstance(each, Tensor) for each in args)
        if func in self.ADD and tensors and args[0].shape == args[1].shape:
            self._note(args, func is torch.Tensor.add_)
        result = func(*args, **(kwargs or {}))
        if func in self.SCALE and two:
            for x, factor in (args, args[::-1]):
                name = next((n for n, output in self.outputs.items() if output is x), None)
                if name and x.shape[-1:] == self.like.shape[-1:]:
                    scale = torch.as_tensor(factor)
                    if scale.shape in ((), x.shape[-1:]):
                        self.scaled[name] = result, scale.to(x).expand(x.shape[-1:])
        return result

    def _note(self, args: tuple[Tensor, Tensor], in_place: bool) -> None:
        # an inactive dropout returns the same tensor
        outputs = [*self.outputs.items(), *((name, y) for name, (y, _) in self.scaled.items())]
        names = [next((n for n, output in outputs if output is x), None) for x in args]
        for name, x, other, others in zip(names, args, args[::-1], names[::-1], strict=True):
            rows = other.shape[-1:] == self.like.shape[-1:]  # (batch, tokens, d) or (rows, d)
            if not name or others or not rows or other.numel() != self.like.numel():
                continue
            if name in self.scaled and x is self.scaled[name][0]:
                self.streams.scales[name] = self.scaled[name][1]
            if name in self.scales:  # with another γ here, the difference belongs to the stream
                other = other + (x - self.scales[name] * self.outputs[name])
            elif in_place and other is args[0]:
                other = other.clone()
            self.streams.add(name, other)
        for named in (self.outputs, self.scaled) if in_place else ():
            named.pop(names[0], None)  # now a sum, as of Falcon's attention and MLP


@contextmanager
def residual_streams(
    block: nn.Module,
    names: Sequence[str],
    hidden: Tensor,
    enough: Enough | None = None,
    scales: Mapping[str, Tensor] = {},
) -> Iterator[Captured]:
    """Capture the residual streams that outputs of named linears are added to in the next forward.

    A linear is left out if its output is first normed or added to another linear's, or is never
    added to something with the rows of `hidden`. With `scales` γ, a stream is the sum minus γ y.
    """
    additions = Additions(hidden, scales, enough)
    hooks = output_hooks(block, names, additions.outputs.__setitem__)
    with suppress(StopForward), hooks, additions:
        yield additions.streams
    additions.outputs.clear()
    additions.scaled.clear()
    if changed := additions.streams.overwritten:
        raise BadCapture(changed, "the residual stream was overwritten after the addition to it")
