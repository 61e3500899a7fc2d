"""Run a model's blocks one by one, and prove that this equals the model's own forward.

Activations that transformers writes as several operations run in place: the same operations in the
same order, so the same bits, with less memory."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from transformers.activations import NewGELUActivation, QuickGELUActivation

from featcal.errors import BadCapture, BadPlan
from featcal.models.batch import Batch, out_of_memory
from featcal.models.capture import (
    Arguments,
    Features,
    block_outputs,
    feeding,
    first_inputs,
    model_call,
    replaced_forwards,
)
from featcal.models.moe import ROUNDING, same_unpacked
from featcal.models.plan import BlockPlan, Stack, blocks_of, part_of

NO_REPLAY = (
    "this model cannot be calibrated as a whole; choose blocks with plan=featcal.BlockPlan(...)"
)


def quick_gelu(x: Tensor) -> Tensor:
    """Return x σ(1.702 x), CLIP's activation."""
    return (x * 1.702).sigmoid_().mul_(x)


def new_gelu(x: Tensor) -> Tensor:
    """Return ½ x (1 + tanh(√(2/π) (x + 0.044715 x³))), the activation of T5 and GPT-2."""
    inner = torch.pow(x, 3.0).mul_(0.044715).add_(x).mul_(math.sqrt(2.0 / math.pi))
    return inner.tanh_().add_(1.0).mul_(0.5 * x)


IN_PLACE: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    QuickGELUActivation: quick_gelu,
    NewGELUActivation: new_gelu,
}


@contextmanager
def in_place(block: nn.Module) -> Iterator[None]:
    """Run a block's activations in place inside the `with`, unless gradients are needed."""
    modules = [] if torch.is_grad_enabled() else block.modules()
    faster = [
        (module, IN_PLACE[type(module)])
        for module in modules
        if type(module) in IN_PLACE and "forward" not in vars(module)
    ]
    with replaced_forwards(faster):
        yield


def step(block: nn.Module, stack: Stack, hidden: Tensor, arguments: Arguments) -> Features:
    """Run one block; return its output and the arguments of the blocks that follow.

    Raises: BadCapture if the block overwrites its own input, which a second pass would need.
    """
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


def replay(model: nn.Module, plan: BlockPlan, batch: Batch) -> dict[str, Tensor]:
    """Return every stack's last output: the model's own forward to block 0, then block by block."""
    result, outputs = None, {}
    for source, stack in plan.in_order:
        blocks = blocks_of(model, stack)
        with feeding(model, source, stack, result):
            hidden, arguments = first_inputs(model, blocks, batch, stack.mixed)
        for block in blocks:
            hidden, arguments = step(block, stack, hidden, arguments)
        outputs[stack.name] = hidden
        result = stack_output(model, stack, hidden) if stack.feeds else None
    return outputs


def check_replay(model: nn.Module, plan: BlockPlan, batch: Batch) -> None:
    """Raise BadPlan unless replaying every stack's blocks gives the result of the model's forward.

    A CPU replays bit for bit; a GPU's kernels may differ in the last bits.
    """
    name = type(model).__name__
    with torch.no_grad():
        with ExitStack() as hooks:
            features = {
                stack.name: hooks.enter_context(block_outputs(model, blocks_of(model, stack)))
                for stack in plan.stacks
            }
            hooks.enter_context(same_unpacked(model))
            model(**model_call(model, batch))
        try:
            replayed = replay(model, plan, batch)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            if out_of_memory(error):
                raise
            reason = " ".join(str(error).split())[:200]
            problem = f"its blocks cannot be run one by one ({reason})"
            raise BadPlan(name, problem, NO_REPLAY) from error
    for stack in plan.stacks:
        own = list(features[stack.name].values())[-1]
        difference = float((replayed[stack.name] - own).abs().max())
        if not difference <= ROUNDING * float(own.abs().max()):
            problem = (
                f"replaying {stack.blocks!r} block by block differs from the model's own forward "
                f"by {difference:.3g}"
            )
            way_out = f"the blocks exchange something a block plan cannot express; {NO_REPLAY}"
            raise BadPlan(name, problem, way_out)
