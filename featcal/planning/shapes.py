"""What calibration will meet in a model, stack by stack, from one batch without numbers: work and
bytes.

Knows no weights, no files, no number of samples or tasks.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from featcal.blocks.capture import block_outputs, feeding, first_inputs, model_call
from featcal.blocks.experts import unpacked
from featcal.blocks.plan import BlockPlan, blocks_of
from featcal.blocks.replay import handed_on
from featcal.planning.block_shape import PAPER, Asked, BlockShape, BlockTask, block_shape
from featcal.planning.meta_profiler import (
    held_bytes,
    rehearsing,
    shapes_suffice,
    size,
    used_parameters,
)


@dataclass(frozen=True)
class StackShape:
    """One stack: what leads to its first block, and its blocks."""

    name: str
    entry: int  # flops
    weights: int  # parameters outside of blocks that lead to the first one
    working: int  # bytes at the peak on the way there
    features: int  # bytes of hidden states and arguments before the first block
    blocks: tuple[BlockShape, ...]

    @property
    def between(self) -> int:
        """Bytes of the features of one batch between blocks, of both tracks, where they are
        most.
        """
        return 2 * max(self.features, *(block.features for block in self.blocks))


@dataclass(frozen=True)
class ModelShape:
    """A whole model on one batch."""

    forward: int  # flops of its own forward
    working: int  # bytes at the peak of that
    batch: int  # bytes of what it is fed
    weights: int  # bytes of all parameters
    outside: int  # bytes of parameters outside of blocks
    first: int  # bytes of the first parameter, which a model is never without
    largest: int  # bytes of the largest one
    stacks: tuple[StackShape, ...]

    @property
    def blocks(self) -> list[BlockShape]:
        """The blocks of all stacks."""
        return [block for stack in self.stacks for block in stack.blocks]


def model_shape(
    model: nn.Module, plan: BlockPlan, batch: Mapping[str, Any], asked: Asked = PAPER
) -> ModelShape:
    """The shape of a model without numbers on a batch without numbers, both on the meta device.

    Of a mixture of experts each is thought to be given as many tokens as any other: their sum, and
    with it the work, is the same.

    Raises: BadPlan for a model whose forward depends on the numbers it is fed.
    """
    with shapes_suffice(model), unpacked(model):
        with (
            ExitStack() as hooks,
            rehearsing(asked.padded) as whole,
        ):  # what blocks put out is kept, to be compared
            seen = [
                hooks.enter_context(block_outputs(model, blocks_of(model, stack)))
                for stack in plan.stacks
            ]
            model(**model_call(model, batch))
        del seen
        stacks = stack_shapes(model, plan, batch, asked)
    inside = inside_blocks(model, plan)
    outside = size(p for p in model.parameters() if id(p) not in inside)
    sizes = [size([p]) for p in model.parameters()]
    return ModelShape(
        whole.flops,
        whole.peak,
        held_bytes(batch),
        sum(sizes),
        outside,
        sizes[0],
        max(sizes),
        stacks,
    )


def inside_blocks(model: nn.Module, plan: BlockPlan) -> set[int]:
    """Identities of the parameters of all blocks."""
    return {id(p) for stack in plan.stacks for p in blocks_of(model, stack).parameters()}


def stack_shapes(
    model: nn.Module, plan: BlockPlan, batch: Mapping[str, Any], asked: Asked
) -> tuple[StackShape, ...]:
    """The shapes of all stacks in forward order, each fed by the one before."""
    inside = inside_blocks(model, plan)
    stacks: list[StackShape] = []
    result: Tensor | None = None
    for source, stack in plan.in_order:
        blocks = blocks_of(model, stack)
        with (
            rehearsing(asked.padded) as entry,
            used_parameters(model) as used,
            feeding(model, source, stack, result),
        ):
            features = first_inputs(model, blocks, batch, stack.mixed)
        before, weights = held_bytes(features), size(p for p in used if id(p) not in inside)
        shapes, rule = [], asked.rule or plan.rule(stack)
        for index, block in enumerate(blocks):
            here = BlockTask(
                f"{stack.name}.{index:02d}",
                index + 1 == len(blocks),
                rule,
                source.feeds if source else "",
                asked,
            )
            shape, features = block_shape(block, stack, features, here)
            shapes.append(shape)
        stacks.append(
            StackShape(stack.name, entry.flops, weights, entry.peak, before, tuple(shapes))
        )
        result = handed_on(model, stack, features[0]) if stack.feeds else None
    return tuple(stacks)
