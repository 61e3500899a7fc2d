"""How much a run computes, in floating point operations (2 for one multiplication and addition),
from shapes alone.

Matrix products, attention, convolutions and factorisations count; what is linear in the features
(norms, weights) does not.
Legend: d inputs · o outputs · n rows of one site.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from featcal.core.moments import stripes
from featcal.planning.block_shape import BlockShape, PartShape, SiteShape
from featcal.planning.shapes import ModelShape
from featcal.settings import Calibration


@dataclass(frozen=True)
class Work:
    """Floating point operations of a run, by what they are for."""

    check: int = 0  # the first samples through the model, and once more block by block
    forwards: int = 0  # passes of the student and of the teachers
    moments: int = 0  # sums over tokens
    systems: int = 0  # each task's normal equations and their solutions

    @property
    def total(self) -> int:
        """All of them."""
        return self.check + self.forwards + self.moments + self.systems


@dataclass(frozen=True)
class Done:
    """What a run has to do, or did, in all its processes."""

    batches: Mapping[ModelShape, int]  # how many of each shape, over all tasks
    tasks: int
    first: ModelShape  # of the very first batch
    checked: ModelShape  # of the samples that the plan is checked on
    settings: Calibration = Calibration()
    on_gpu: bool = False
    replayed: Collection[str] = ()  # blocks that an earlier run has solved
    tokens: Mapping[str, int] | None = (
        None  # by block, without padding; None where everything is a token
    )
    left: Collection[
        str
    ] = ()  # blocks through which samples do not run once more when they are solved


def run_work(done: Done) -> Work:
    """A whole run; further processes check the plan once more each, which is left out."""
    work = [batch_work(done, shape, count) for shape, count in done.batches.items()]
    solved = [block for block in done.first.blocks if block.name not in done.replayed]
    systems = sum(
        systems_work(site, done.tasks, done.settings) for block in solved for site in block.sites
    )
    return Work(
        check=check_work(done.checked),
        forwards=sum(forwards for forwards, _ in work) + left_out(done, done.first),
        moments=sum(moments for _, moments in work),
        systems=systems,
    )


def batch_work(done: Done, shape: ModelShape, count: int) -> tuple[int, int]:
    """Batches of one shape: both models up to the first block and through every block; moments of
    the blocks that are solved.
    """
    forwards, moments = sum(2 * stack.entry for stack in shape.stacks), 0
    for block in shape.blocks:
        if block.name in done.replayed:
            forwards += 2 * block.forward
        else:
            stale, after = done.settings.order == "stale", block.name not in done.left
            forwards += observing_work(block, done.settings) + (after + stale) * block.forward
            moments += sum(
                moments_work(site, share(done, block), done.on_gpu) for site in block.sites
            )
    return count * forwards, count * moments


def together(block: BlockShape, settings: Calibration) -> list[Sequence[PartShape]]:
    """What of a block is solved together, in turn, as `calibration.parts.block_parts` takes it
    apart.
    """
    return [block.parts] if settings.order != "sites" else [(part,) for part in block.parts]


def observing_work(block: BlockShape, settings: Calibration) -> int:
    """One batch that something is solved with: passes of the student and of its expert, which once
    goes to the end.
    """
    turns = together(block, settings)
    led = [parts for parts in turns if any(part.linears for part in parts)]
    return (
        sum(block.student_pass(parts) for parts in turns)
        + sum(block.teacher_pass(parts) for parts in led[:-1])
        + block.forward
        + len(led) * block.led
    )


def left_out(done: Done, shape: ModelShape) -> int:
    """Of the very first batch: what it runs through beyond the last module of the first part, and
    to see a block's parts.
    """
    solved = [block for block in shape.blocks if block.name not in done.replayed]
    looks = done.settings.aims_at_the_stream + (done.settings.order == "sites")
    beyond = sum(
        block.forward - block.student_pass(together(block, done.settings)[0])
        for block in solved
        if block.parts
    )
    return beyond + looks * sum(block.forward for block in solved)


def share(done: Done, block: BlockShape) -> float:
    """How many of a block's rows are no padding; rows without weight are left out of the
    moments.
    """
    if done.tokens is None:
        return 1
    return done.tokens[block.name] / rows(done, block)


def rows(done: Done, block: BlockShape) -> int:
    """Tokens that reach a block in all batches, padding included."""
    return sum(
        count * each.rows
        for shape, count in done.batches.items()
        for each in shape.blocks
        if each.name == block.name
    )


def check_work(shape: ModelShape) -> int:
    """The model's own forward, beside it a mixture's experts as linears, and the replay of its
    blocks.
    """
    return (
        shape.forward
        + sum(stack.entry for stack in shape.stacks)
        + sum(block.forward + block.led for block in shape.blocks)
    )


def gram_work(n: int, d: int, on_gpu: bool = False) -> int:
    """A Gram matrix of n rows, computed in stripes above the diagonal."""
    return sum(2 * n * (end - start) * (d - start) for start, end in stripes(d, on_gpu))


def moments_work(site: SiteShape, share: float = 1, on_gpu: bool = False) -> int:
    """One batch: the Gram matrix, the cross moment, and the expert's output where it is needed and
    was not kept.
    """
    n, d, width = int(share * site.n), site.d, site.o if site.folded else site.d
    again = 2 * site.n * d * site.o if site.folded and not site.kept else 0
    return gram_work(n, d, on_gpu) + 2 * n * d * width + again


def systems_work(site: SiteShape, tasks: int, settings: Calibration) -> int:
    """Each task's moments times its expert's weight, and beside them its task vector's; one factor,
    two triangular solutions.
    """
    d, o = site.d, site.o
    share = 2 * d * d * o + (4 * d * d * site.o if settings.prior else 0)
    return tasks * share + 2 * d * d * o + d**3 // 3 + 2 * d * d * o
