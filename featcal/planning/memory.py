"""The memory of a run where the computation happens, phase by phase, in bytes from shapes alone.

Legend: d inputs · o outputs · n rows of one site in one batch · N of all tasks.
"""

from collections.abc import Sequence

from featcal.core.moments import stripes
from featcal.core.precision import SUM_DTYPE
from featcal.planning.block_shape import BlockShape, SiteShape
from featcal.planning.shapes import ModelShape, StackShape
from featcal.planning.workload import Workload

SUM = SUM_DTYPE.itemsize
ROW = 4  # bytes of a value in a product: half precision becomes float32


def phases(shape: ModelShape, load: Workload) -> dict[str, dict[str, int]]:
    """The parts of the memory of every phase behind the check, each at the stack or block where it
    needs most.
    """

    def worst(candidates: list[dict[str, int]]) -> dict[str, int]:
        return max(candidates, key=lambda parts: sum(parts.values()))

    away = (
        load.on_gpu or load.host_budget is not None
    )  # where features come from; else they are part of what waits
    batch = max(stack.between for stack in shape.stacks) if away else 0
    apart = load.settings.order == "sites"
    together = [
        (block, sites)
        for block in shape.blocks
        for sites in (zip(block.sites) if apart else [block.sites])
    ]
    turns = [(block, sites, seen) for block, sites in together for seen in last_two(load)]
    return {
        "start": worst([starting(shape, stack) for stack in shape.stacks]),
        "observe": worst([observing(*turn, load) | {"batch": batch} for turn in turns]),
        "add": worst([adding(*turn, at, load) for turn in turns for at in range(len(turn[1]))]),
        "solve": worst(
            [
                solving(block, sites, at, load)
                for block, sites in together
                for at in range(len(sites))
            ]
        ),
        "advance": worst([advancing(block) | {"batch": batch} for block in shape.blocks]),
    }


def checking(shape: ModelShape) -> dict[str, int]:
    """The first samples through the whole merged model while the first expert is open."""
    blocks = max(block.weights for block in shape.blocks)
    return {"weights": shape.outside + blocks + shape.first, "working": shape.batch + shape.working}


def starting(shape: ModelShape, stack: StackShape) -> dict[str, int]:
    """Before the first block: what leads there, of one expert and of the student, all of which was
    needed for the check.
    """
    student = shape.outside if stack is shape.stacks[0] else stack.weights
    return {"weights": student + stack.weights, "working": shape.batch + stack.working}


def last_two(load: Workload) -> list[int]:
    """How many tasks were seen before the last one, and before the one before it, when the last
    one's block is read ahead.
    """
    return [seen for seen in (load.tasks_here - 1, load.tasks_here - 2) if seen >= 0]


def observing(
    block: BlockShape, sites: Sequence[SiteShape], seen: int, load: Workload
) -> dict[str, int]:
    """A task, for sites that are solved together: its moments, what those seen before added up to,
    one batch at work.
    """
    return {
        "weights": open_blocks(block, seen, load),
        "moments": sum(moments_bytes(site) for site in sites),
        "systems": sum(kept_bytes(site, seen) for site in sites),
        "working": observation_bytes(block, load.on_gpu),
    }


def adding(
    block: BlockShape, sites: Sequence[SiteShape], seen: int, at: int, load: Workload
) -> dict[str, int]:
    """A task's moments becoming its share, site by site: of the first task the system itself, which
    has other right sides.
    """
    return {
        "weights": open_blocks(block, seen, load),
        "moments": sum(moments_bytes(site) for site in sites[at:]),
        "systems": sum(kept_bytes(site, seen + (number < at)) for number, site in enumerate(sites)),
        "working": addition_bytes(sites[at], load),
    }


def open_blocks(block: BlockShape, seen: int, load: Workload) -> int:
    """Blocks of the student, one expert and, of all but the last, the next one; the base's where
    there is a prior.
    """
    ahead, with_base = seen + 1 < load.tasks_here, bool(load.settings.prior)
    return (2 + ahead + with_base) * block.weights


def solving(
    block: BlockShape, sites: Sequence[SiteShape], at: int, load: Workload
) -> dict[str, int]:
    """One site of all: blocks of the student and the base, systems that are left, weights and
    anchors, what is solved.
    """
    solved, site, left = sites[:at], sites[at], sites[at:]
    # two weights, and twice in float64: the anchor and on the way to it
    working = (2 * ROW + 2 * SUM) * site.d * site.o
    return {
        "weights": 2 * block.weights,
        "systems": sum(kept_bytes(each, load.tasks) for each in left),
        "solutions": sum(SUM * each.d * each.o for each in solved),
        "working": working,
    }


def advancing(block: BlockShape) -> dict[str, int]:
    """The solved block run once more."""
    return {"weights": block.weights, "working": block.working}


def moments_bytes(site: SiteShape) -> int:
    """Sums of one task: the Gram matrix, the cross moment, two means; what the residual stream
    lacks.
    """
    cross = site.d * (site.o if site.folded else site.d)
    return SUM * (site.d * site.d + cross + 2 * site.d + site.lagging * site.o)


def kept_bytes(site: SiteShape, seen: int) -> int:
    """Bytes of one site's accumulated normal equations, once some tasks are seen."""
    return SUM * bool(seen) * (site.d * site.d + site.d * site.o + site.d + site.o)


def addition_bytes(site: SiteShape, load: Workload) -> int:
    """A task's moments becoming its share of the system: the expert's weight, as it is and in
    float64, and a new right side.

    Of a prior its own share of both sides, beside the task's, and the task vector.
    """
    right, prior = site.d * site.o, bool(load.settings.prior)
    own = (ROW + SUM * (1 if site.folded else 2)) * right
    return max(own, prior * SUM * (site.d * site.d + 4 * right))


def observation_bytes(block: BlockShape, on_gpu: bool = False) -> int:
    """One batch seen: what one track's modules read, and then a pass of the other's, or that of the
    other and the products.
    """
    products = max(
        (product_bytes(site, on_gpu) + lag_bytes(site) for site in block.sites), default=0
    )
    return block.captured + max(block.working, block.captured + block.features + products)


def product_bytes(site: SiteShape, on_gpu: bool = False) -> int:
    """One batch at one site: weighed rows of both tracks, a product, and on a CPU the same in
    float64 before it is added.
    """
    width = site.o if site.folded else site.d
    rows = ROW * site.n * (site.d + width) if site.weighed else 0
    stripe = max(end - start for start, end in stripes(site.d, on_gpu))
    return rows + (ROW if on_gpu else ROW + SUM) * site.d * max(stripe, width)


def lag_bytes(site: SiteShape) -> int:
    """One batch: the residual streams of both models, and their difference on the way to the
    target.
    """
    return site.lagging * (2 * ROW + 3 * SUM) * site.n * site.o
