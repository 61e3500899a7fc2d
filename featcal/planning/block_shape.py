"""What calibration will meet in one block, from one batch without numbers: sites, work, bytes.

Legend: d inputs · o outputs · n rows (tokens of one batch). Knows no weights, no files, no number
of samples or tasks.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from featcal.blocks.capture import Features, module_inputs, module_outputs
from featcal.blocks.experts import unpacked_experts
from featcal.blocks.linear import weight_of
from featcal.blocks.plan import Stack
from featcal.blocks.replay import step
from featcal.calibration.observe import FOLDED_SHARE, narrow_linears
from featcal.calibration.parts import reading_alike, written
from featcal.calibration.sites import calibrated_modules, shared_sites
from featcal.calibration.tokens import same_memory
from featcal.core.weighting import TokenRule
from featcal.planning.meta_profiler import held_bytes, reaching, rehearsing, size
from featcal.settings import Calibration


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
    """One block; work in floating point operations (flops), everything else in bytes, both of one
    batch.
    """

    name: str
    sites: tuple[SiteShape, ...]
    norms: tuple[int, ...]  # features of each norm
    forward: int  # flops of one pass
    parts: tuple[PartShape, ...]  # in forward order
    weights: int  # parameters
    # what linears and norms read and what is kept of what they put out, the block's own input left
    # out
    captured: int
    working: int  # at the peak of a pass, what was captured till then included
    rows: int  # tokens, padding included
    features: int  # hidden states and arguments after the block
    led: int = (
        0  # flops of a mixture's experts, which of teachers run once more, on the student's tokens
    )

    def student_pass(self, parts: Sequence[PartShape]) -> int:
        """Flops of a pass that ends where all is seen that solving some parts needs of the
        student.
        """
        return max(
            (part.passed if part.lagging else part.reached for part in parts), default=self.forward
        )

    def teacher_pass(self, parts: Sequence[PartShape]) -> int:
        """The same of an expert; 0 where there are norms alone."""
        return max(
            (
                part.passed if part.kept or part.lagging else part.reached
                for part in parts
                if part.linears
            ),
            default=0,
        )


@dataclass(frozen=True)
class Asked:
    """How blocks are looked at."""

    norm: bool = True  # norms are solved
    modules: Sequence[str] | None = (
        None  # linears that are solved, by how their names end; all where None
    )
    residual: bool = False  # linears that write into the residual stream aim at the expert's
    rule: TokenRule | None = None  # in place of the plan's
    padded: bool = False  # sequences differ in length

    @classmethod
    def by(
        cls, settings: Calibration, rule: TokenRule | None = None, padded: bool = False
    ) -> "Asked":
        """As a calibration with these settings looks at them."""
        return cls(settings.norm, settings.modules, settings.aims_at_the_stream, rule, padded)


PAPER = Asked()


@dataclass(frozen=True)
class BlockTask:
    """What is to be known of a block beside itself."""

    name: str
    last: bool
    rule: TokenRule
    fed: str  # keyword of what another stack feeds to it
    asked: Asked


def block_shape(
    block: nn.Module, stack: Stack, features: Features, task: BlockTask
) -> tuple[BlockShape, Features]:
    """The shape of one block, and what it puts out."""
    modules = calibrated_modules(block, task.asked.norm, task.asked.modules)
    writers = (
        written(block, stack, *features) & set(modules.linears) if task.asked.residual else set()
    )
    names, narrow = modules.linears + modules.norms, narrow_linears(block, modules.linears, writers)
    with rehearsing(task.asked.padded) as pass_, reaching(block, names, pass_) as reached:
        with module_inputs(block, names) as inputs, module_outputs(block, narrow) as outputs:
            out = step(block, stack, *features)
    norms = tuple(
        block.get_submodule(name).get_parameter("weight").numel() for name in modules.norms
    )
    own_input = [x for x in inputs.values() if same_memory(x, features[0])][:1]
    shape = BlockShape(
        name=task.name,
        sites=site_shapes(block, modules.linears, inputs, outputs, features, task, writers),
        norms=norms,
        forward=pass_.flops,
        parts=part_shapes(block, modules.linears, inputs, reached, narrow, writers),
        weights=size(block.parameters()),
        captured=held_bytes((inputs, outputs)) - held_bytes(own_input),
        working=pass_.peak,
        rows=features[0].shape[:2].numel(),
        features=held_bytes(out),
        led=sum(part.work for part in unpacked_experts(block).values()),
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
        own = (
            2 * inputs[name].numel() * len(weight_of(block.get_submodule(name)))
            if name in linears
            else 0
        )
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
    features: Features,
    task: BlockTask,
    writers: Collection[str],
) -> tuple[SiteShape, ...]:
    """Linears grouped as calibration groups them: by the tensor they read and by the weights of its
    tokens.
    """
    shape = tuple(features[0].shape[:2])
    sites = shared_sites(inputs, linears, lambda name, _: task.rule(name, task.last, shape))
    found = []
    for names, w in sites.items():
        x, o = inputs[names[0]], sum(len(weight_of(block.get_submodule(name))) for name in names)
        n = int(x.shape[:-1].numel() * (w != 0).double().mean())
        weighed = bool(((w != 0) & (w != 1)).any())
        kept, lagging = (
            all(name in outputs for name in names),
            any(name in writers for name in names),
        )
        found.append(SiteShape(x.shape[-1], o, n, names, weighed, kept, lagging))
    return tuple(found)
