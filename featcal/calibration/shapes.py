"""What calibration will meet in a model, block by block, from one batch without numbers: sites, work, bytes.

Legend: d inputs · o outputs · n rows (tokens of one batch). Knows no weights, no files, no number of samples or tasks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from featcal.blocks.capture import Features, feeding, first_inputs, model_call, module_inputs
from featcal.blocks.linear import weight_of
from featcal.blocks.plan import BlockPlan, Stack, blocks_of
from featcal.blocks.rehearsal import held_bytes, numbers_needless, reaching, rehearsing, same_place, size, used_parameters
from featcal.blocks.replay import handed_on, step
from featcal.calibration.sites import calibrated_modules
from featcal.core.weighting import TokenRule


@dataclass(frozen=True)
class SiteShape:
    """Linears that share their input."""

    d: int
    o: int  # of all its linears
    n: int
    linears: tuple[str, ...] = field(default=(), compare=False)  # their names; two sites of one shape cost the same


@dataclass(frozen=True)
class BlockShape:
    """One block; work in floating point operations (flops), everything else in bytes, both of one batch."""

    name: str
    sites: tuple[SiteShape, ...]
    norms: tuple[int, ...]  # features of each norm
    forward: int  # flops of one pass
    first_pass: int  # flops of a pass that ends where the last solved module has its input
    weights: int  # parameters
    captured: int  # what linears and norms read, the block's own input left out
    working: int  # at the peak of a pass, what linears and norms read being kept
    features: int  # hidden states and arguments behind the block


@dataclass(frozen=True)
class StackShape:
    """One stack: what leads to its first block, and its blocks."""

    name: str
    entry: int  # flops
    weights: int  # parameters outside of blocks that lead to the first one
    working: int  # bytes at the peak on the way there
    features: int  # bytes of hidden states and arguments before the first block
    blocks: tuple[BlockShape, ...]


@dataclass(frozen=True)
class ModelShape:
    """A whole model on one batch."""

    forward: int  # flops of its own forward
    working: int  # bytes at the peak of that
    batch: int  # bytes of what it is fed
    weights: int  # bytes of all parameters
    outside: int  # bytes of parameters outside of blocks
    stacks: tuple[StackShape, ...]

    @property
    def blocks(self) -> list[BlockShape]:
        """The blocks of all stacks."""
        return [block for stack in self.stacks for block in stack.blocks]


def model_shape(
    model: nn.Module,
    plan: BlockPlan,
    batch: Mapping[str, Any],
    norm: bool = True,
    rule: TokenRule | None = None,
    padded: bool = False,
) -> ModelShape:
    """The shape of a model without numbers on a batch without numbers, both on the meta device.

    Args: norm: whether norms are solved; rule: in place of the plan's; padded: whether sequences differ in length.
    Raises: BadPlan for a model whose forward depends on the numbers it is fed.
    """
    with numbers_needless(model):
        with rehearsing(padded) as whole:
            model(**model_call(model, batch))
        stacks = stack_shapes(model, plan, batch, Asked(norm, rule, padded))
    inside = inside_blocks(model, plan)
    outside = size(p for p in model.parameters() if id(p) not in inside)
    return ModelShape(whole.flops, whole.peak, held_bytes(batch), size(model.parameters()), outside, stacks)


@dataclass(frozen=True)
class Asked:
    """How blocks are looked at."""

    norm: bool
    rule: TokenRule | None
    padded: bool


def inside_blocks(model: nn.Module, plan: BlockPlan) -> set[int]:
    """Identities of the parameters of all blocks."""
    return {id(p) for stack in plan.stacks for p in blocks_of(model, stack).parameters()}


def stack_shapes(model: nn.Module, plan: BlockPlan, batch: Mapping[str, Any], asked: Asked) -> tuple[StackShape, ...]:
    """The shapes of all stacks in forward order, each fed by the one before."""
    inside = inside_blocks(model, plan)
    stacks: list[StackShape] = []
    result: Tensor | None = None
    for source, stack in plan.in_order:
        blocks = blocks_of(model, stack)
        with rehearsing(asked.padded) as entry, used_parameters(model) as used, feeding(model, source, stack, result):
            features = first_inputs(model, blocks, batch, stack.mixed)
        before, weights = held_bytes(features), size(p for p in used if id(p) not in inside)
        shapes, rule = [], asked.rule or plan.rule(stack)
        for index, block in enumerate(blocks):
            here = BlockTask(f"{stack.name}.{index:02d}", index + 1 == len(blocks), rule, asked.norm)
            shape, features = block_shape(block, stack, features, here, asked.padded)
            shapes.append(shape)
        stacks.append(StackShape(stack.name, entry.flops, weights, entry.peak, before, tuple(shapes)))
        result = handed_on(model, stack, features[0]) if stack.feeds else None
    return tuple(stacks)


@dataclass(frozen=True)
class BlockTask:
    """What is to be known of a block beside itself."""

    name: str
    last: bool
    rule: TokenRule
    norm: bool


def block_shape(block: nn.Module, stack: Stack, features: Features, task: BlockTask, padded: bool) -> tuple[BlockShape, Features]:
    """The shape of one block, and what it puts out."""
    modules = calibrated_modules(block, task.norm)
    names = modules.linears + modules.norms
    with rehearsing(padded) as pass_, reaching(block, names, pass_) as reached, module_inputs(block, names) as inputs:
        out = step(block, stack, *features)
    norms = tuple(block.get_submodule(name).get_parameter("weight").numel() for name in modules.norms)
    shape = BlockShape(
        name=task.name,
        sites=site_shapes(block, modules.linears, inputs, features[0], task),
        norms=norms,
        forward=pass_.flops,
        first_pass=reached[-1],
        weights=size(block.parameters()),
        captured=held_bytes(inputs) - held_bytes([x for x in inputs.values() if same_place(x, features[0])][:1]),
        working=pass_.peak,
        features=held_bytes(out),
    )
    return shape, out


def site_shapes(
    block: nn.Module, linears: Sequence[str], inputs: Mapping[str, Tensor], hidden: Tensor, task: BlockTask
) -> tuple[SiteShape, ...]:
    """Linears grouped as calibration groups them: by the tensor they read and by the weights of its tokens."""
    groups: list[list[str]] = []
    shape = tuple(hidden.shape[:2])
    for name in linears:
        for names in groups:
            if same_place(inputs[name], inputs[names[0]]) and torch.equal(
                task.rule(name, task.last, shape), task.rule(names[0], task.last, shape)
            ):
                names.append(name)
                break
        else:
            groups.append([name])
    outputs = [sum(weight_of(block.get_submodule(name)).shape[0] for name in names) for names in groups]
    firsts = [inputs[names[0]] for names in groups]
    found = zip(firsts, outputs, groups, strict=True)
    return tuple(SiteShape(x.shape[-1], o, x.shape[:-1].numel(), tuple(names)) for x, o, names in found)
