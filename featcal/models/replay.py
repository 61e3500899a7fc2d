"""Activations that transformers writes as several operations, each of which makes a tensor of its
own: the same ones in place.

Every number goes through the same operations in the same order, so no bit changes; what is saved is
memory and the way to it."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import NewGELUActivation, QuickGELUActivation

from featcal.errors import BadCapture, BadPlan
from featcal.models.batch import out_of_memory
from featcal.models.capture import (
    Arguments,
    Features,
    block_outputs,
    feeding,
    first_inputs,
    model_call,
)
from featcal.models.moe import checked
from featcal.models.plan import BlockPlan, Stack, blocks_of, part_of


def quick_gelu(x: Tensor) -> Tensor:
    """x σ(1.702 x), of CLIP."""
    return (x * 1.702).sigmoid_().mul_(x)


def new_gelu(x: Tensor) -> Tensor:
    """½ x (1 + tanh(√(2/π) (x + 0.044715 x³))), of T5 and GPT-2."""
    return (
        torch.pow(x, 3.0)
        .mul_(0.044715)
        .add_(x)
        .mul_(math.sqrt(2.0 / math.pi))
        .tanh_()
        .add_(1.0)
        .mul_(0.5 * x)
    )


IN_PLACE: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    QuickGELUActivation: quick_gelu,
    NewGELUActivation: new_gelu,
}


@contextmanager
def in_place(block: nn.Module) -> Iterator[None]:
    """Inside, these activations of the block work in place; not where gradients are asked for,
    which need what is between.
    """
    found = (
        []
        if torch.is_grad_enabled()
        else [m for m in block.modules() if type(m) in IN_PLACE and "forward" not in vars(m)]
    )
    for module in found:
        vars(module)["forward"] = IN_PLACE[type(module)]
    try:
        yield
    finally:
        for module in found:
            del vars(module)["forward"]


NO_REPLAY = "this model cannot be calibrated as a whole; a list of blocks that can is named with plan=featcal.BlockPlan(...)"
# of the largest feature; a CPU replays bit for bit, kernels of a GPU may differ in the last bits
ROUNDING = 1e-5


def step(block: nn.Module, stack: Stack, hidden: Tensor, arguments: Arguments) -> Features:
    """One block: its output and the arguments of the blocks behind it.

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


def handed_on(model: nn.Module, stack: Stack, hidden: Tensor) -> Tensor:
    """What a stack feeds to the next one, of what its last block puts out."""
    result: Tensor = part_of(model, stack.exit)(hidden) if stack.exit else hidden
    return result


def replay(model: nn.Module, plan: BlockPlan, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """What the last block of every stack puts out, by stack: the model's own forward to the first
    block, then block by block.
    """
    result, outputs = None, {}
    for source, stack in plan.in_order:
        blocks = blocks_of(model, stack)
        with feeding(model, source, stack, result):
            hidden, arguments = first_inputs(model, blocks, batch, stack.mixed)
        for block in blocks:
            hidden, arguments = step(block, stack, hidden, arguments)
        outputs[stack.name] = hidden
        result = handed_on(model, stack, hidden) if stack.feeds else None
    return outputs


def check_replay(model: nn.Module, plan: BlockPlan, batch: Mapping[str, Any]) -> None:
    """Raise BadPlan unless replaying the blocks of every stack gives what the model's own forward
    gives.
    """
    with torch.no_grad(), ExitStack() as hooks:
        seen = {
            stack.name: hooks.enter_context(block_outputs(model, blocks_of(model, stack)))
            for stack in plan.stacks
        }
        with checked(model):
            model(**model_call(model, batch))
        own = {name: list(outputs.values())[-1] for name, outputs in seen.items() if outputs}
        hooks.close()
        try:
            replayed = replay(model, plan, batch)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            if out_of_memory(error):
                raise
            reason = " ".join(str(error).split())[:200]
            raise BadPlan(
                type(model).__name__, f"its blocks cannot be run one by one ({reason})", NO_REPLAY
            ) from error
    for stack in plan.stacks:
        difference = float((replayed[stack.name] - own[stack.name]).abs().max())
        if not difference <= ROUNDING * float(own[stack.name].abs().max()):
            raise BadPlan(
                type(model).__name__,
                f"replaying {stack.blocks!r} block by block differs from the model's own forward by {difference:.3g}",
                f"the blocks exchange something a block plan cannot express; {NO_REPLAY}",
            )
