"""What calibration will meet in a model, block by block, from one batch without numbers: sites, work, bytes.

Legend: d inputs · o outputs · n rows (tokens of one batch). Knows no weights, no files, no number of samples or tasks.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from featcal.blocks.capture import Features, block_outputs, feeding, first_inputs, model_call, module_inputs, module_outputs
from featcal.blocks.experts import unpacked, unpacked_experts
from featcal.blocks.linear import weight_of
from featcal.blocks.plan import BlockPlan, Stack, blocks_of
from featcal.blocks.replay import handed_on, step
from featcal.calibration.observe import FOLDED_SHARE, narrow_linears
from featcal.calibration.parts import reading_alike, written
from featcal.calibration.sites import calibrated_modules, shared_sites
from featcal.calibration.tokens import same_memory
from featcal.core.weighting import TokenRule
from featcal.planning.meta_profiler import held_bytes, reaching, rehearsing, shapes_suffice, size, used_parameters


@dataclass(frozen=True)
class SiteShape:
    """Linears that share their input."""

    d: int
    o: int  # of all its linears
    n: int  # rows that weigh something, padding taken for tokens
    linears: tuple[str, ...] = field(default=(), compare=False)  # their names
    weighed: bool = False  # rows count more or less, by the rule
    kept: bool = False  # what its linears put out is kept for folded moments
    lagging: bool = False  # the target of some is the expert's residual stream

    @property
    def folded(self) -> bool:
        """Whether the cross moment is kept with the expert's weight multiplied in."""
        return self.lagging or self.o < FOLDED_SHARE * self.d


@dataclass(frozen=True)
class PartShape:
    """A norm, or linears that read one tensor; flops of one pass of the block until …"""

    linears: bool
    reached: int  # … the last of them has its input
    passed: int  # … it has put out what it puts out
    kept: bool = False  # of experts some of the outputs are needed
    lagging: bool = False  # both models' residual streams are, where an output is added


@dataclass(frozen=True)
class BlockShape:
    """One block; work in floating point operations (flops), everything else in bytes, both of one batch."""

    name: str
    sites: tuple[SiteShape, ...]
    norms: tuple[int, ...]  # features of each norm
    forward: int  # flops of one pass
    parts: tuple[PartShape, ...]  # in forward order
    weights: int  # parameters
    captured: int  # what linears and norms read and what is kept of what they put out, the block's own input left out
    working: int  # at the peak of a pass, what was captured till then included
    rows: int  # tokens, padding included
    features: int  # hidden states and arguments after the block
    led: int = 0  # flops of a mixture's experts, which of teachers run once more, on the student's tokens
    scores: int = 0  # flops of its attentions' scores

    def student_pass(self, parts: Sequence[PartShape]) -> int:
        """Flops of a pass that ends where all is seen that solving some parts needs of the student."""
        return max((part.passed if part.lagging else part.reached for part in parts), default=self.forward)

    def teacher_pass(self, parts: Sequence[PartShape]) -> int:
        """The same of an expert; 0 where there are norms alone."""
        return max((part.passed if part.kept or part.lagging else part.reached for part in parts if part.linears), default=0)


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
    first: int  # bytes of the first parameter, which a model is never without
    largest: int  # bytes of the largest one
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
    modules: Sequence[str] | None = None,
    residual: bool = False,
) -> ModelShape:
    """The shape of a model without numbers on a batch without numbers, both on the meta device.

    Of a mixture of experts each is thought to be given as many tokens as any other: their sum, and with it the work, is the same.

    Args: norm: whether norms are solved; rule: in place of the plan's; padded: whether sequences differ in length;
        modules: which linears are solved, by how their names end; all where None;
        residual: whether linears that write into the residual stream aim at the expert's.
    Raises: BadPlan for a model whose forward depends on the numbers it is fed.
    """
    with shapes_suffice(model), unpacked(model):
        with ExitStack() as hooks, rehearsing(padded) as whole:  # what blocks put out is kept, to be compared
            seen = [hooks.enter_context(block_outputs(model, blocks_of(model, stack))) for stack in plan.stacks]
            model(**model_call(model, batch))
        del seen
        stacks = stack_shapes(model, plan, batch, Asked(norm, modules, rule, padded, residual))
    inside = inside_blocks(model, plan)
    outside = size(p for p in model.parameters() if id(p) not in inside)
    sizes = [size([p]) for p in model.parameters()]
    return ModelShape(whole.flops, whole.peak, held_bytes(batch), sum(sizes), outside, sizes[0], max(sizes), stacks)


@dataclass(frozen=True)
class Asked:
    """How blocks are looked at."""

    norm: bool
    modules: Sequence[str] | None
    rule: TokenRule | None
    padded: bool
    residual: bool


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
            here = BlockTask(f"{stack.name}.{index:02d}", index + 1 == len(blocks), rule, asked)
            shape, features = block_shape(block, stack, features, here)
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
    asked: Asked


def block_shape(block: nn.Module, stack: Stack, features: Features, task: BlockTask) -> tuple[BlockShape, Features]:
    """The shape of one block, and what it puts out."""
    modules = calibrated_modules(block, task.asked.norm, task.asked.modules)
    writers = written(block, stack, *features) & set(modules.linears) if task.asked.residual else set()
    names, narrow = modules.linears + modules.norms, narrow_linears(block, modules.linears, writers)
    with rehearsing(task.asked.padded) as pass_, reaching(block, names, pass_) as reached:
        with module_inputs(block, names) as inputs, module_outputs(block, narrow) as outputs:
            out = step(block, stack, *features)
    norms = tuple(block.get_submodule(name).get_parameter("weight").numel() for name in modules.norms)
    own_input = [x for x in inputs.values() if same_memory(x, features[0])][:1]
    shape = BlockShape(
        name=task.name,
        sites=site_shapes(block, modules.linears, inputs, outputs, features[0], task, writers),
        norms=norms,
        forward=pass_.flops,
        parts=part_shapes(block, modules.linears, inputs, reached, narrow, writers),
        weights=size(block.parameters()),
        captured=held_bytes((inputs, outputs)) - held_bytes(own_input),
        working=pass_.peak,
        rows=features[0].shape[:2].numel(),
        features=held_bytes(out),
        led=sum(part.work for part in unpacked_experts(block).values()),
        scores=pass_.scores,
    )
    return shape, out


def part_shapes(
    block: nn.Module,
    linears: Sequence[str],
    inputs: Mapping[str, Tensor],
    reached: Mapping[str, int],
    narrow: Sequence[str],
    writers: Collection[str],
) -> tuple[PartShape, ...]:
    """What is solved together with order "sites", in forward order."""

    def passed(name: str) -> int:
        own = 2 * inputs[name].numel() * len(weight_of(block.get_submodule(name))) if name in linears else 0
        return reached[name] + own

    return tuple(
        PartShape(
            linears=names[0] in linears,
            reached=max(reached[name] for name in names),
            passed=max(passed(name) for name in names),
            kept=any(name in narrow for name in names),
            lagging=any(name in writers for name in names),
        )
        for names in reading_alike(inputs, linears)
    )


def site_shapes(
    block: nn.Module,
    linears: Sequence[str],
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    hidden: Tensor,
    task: BlockTask,
    writers: Collection[str],
) -> tuple[SiteShape, ...]:
    """Linears grouped as calibration groups them: by the tensor they read and by the weights of its tokens."""
    shape = tuple(hidden.shape[:2])
    sites = shared_sites(inputs, linears, lambda name, _: task.rule(name, task.last, shape))
    found = []
    for names, w in sites.items():
        x, o = inputs[names[0]], sum(len(weight_of(block.get_submodule(name))) for name in names)
        n = int(x.shape[:-1].numel() * (w != 0).double().mean())
        weighed = bool(((w != 0) & (w != 1)).any())
        kept, lagging = all(name in outputs for name in names), any(name in writers for name in names)
        found.append(SiteShape(x.shape[-1], o, n, names, weighed, kept, lagging))
    return tuple(found)
