"""Running one block again on what reached it, and the check that this equals the model's own forward."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from featcal.blocks.capture import block_outputs, first_inputs, model_call
from featcal.blocks.plan import BlockPlan, Stack
from featcal.errors import BadCapture, ReplayDiffers

ROUNDING = 1e-5  # of the largest feature; a CPU replays bit for bit, kernels of a GPU may differ in the last bits


def step(block: nn.Module, stack: Stack, hidden: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """One block: its output and the keyword arguments of the next block.

    Raises: BadCapture if the block overwrites its own input, which a second pass would need.
    """
    version = hidden._version
    out = block(hidden, **kwargs)
    if hidden._version != version:
        raise BadCapture([type(block).__name__], "the block overwrites its own input in place")
    if isinstance(out, Tensor):
        return out, kwargs
    return out[0], kwargs | {name: out[index] for index, name in stack.carry.items()}


def replay(model: nn.Module, plan: BlockPlan, batch: Mapping[str, Any]) -> Tensor:
    """Output of the last block, by the model's own forward up to the first block and then block by block."""
    blocks = plan.blocks(model)
    hidden, kwargs = first_inputs(model, blocks[0], batch)
    for block in blocks:
        hidden, kwargs = step(block, plan.stack, hidden, kwargs)
    return hidden


def check_replay(model: nn.Module, plan: BlockPlan, batch: Mapping[str, Any]) -> None:
    """Raise ReplayDiffers unless replaying the blocks gives what the model's own forward gives."""
    blocks = plan.blocks(model)
    with torch.no_grad():
        with block_outputs(model, blocks) as own:
            model(**model_call(model, batch))
        expected = own[f"{len(blocks) - 1:02d}"]
        difference = float((replay(model, plan, batch) - expected).abs().max())
    if not difference <= ROUNDING * float(expected.abs().max()):
        raise ReplayDiffers(type(model).__name__, plan.stack.blocks, difference)
