"""What a run will need, from shapes alone: bytes on the device, on the host and on disk, and floating point operations.

Bytes are those of a run that streams: of every model only the current block is there. What Python and torch hold already comes
on top, and so does freed memory that a process keeps: `featcal calibrate` gives it back (cli/allocator.py), callers of the
library may not. Held against real runs on CPUs; those of a GPU are the same sums, which nobody has measured.
Legend: d inputs · o outputs · n rows of one site.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from featcal.blocks.batches import PROVING
from featcal.calibration.batches import held_out
from featcal.core.moments import stripes
from featcal.core.precision import SUM_DTYPE
from featcal.planning.shapes import BlockShape, ModelShape, SiteShape, StackShape
from featcal.planning.work import Done, Work, run_work
from featcal.settings import Calibration

SUM = SUM_DTYPE.itemsize
ROW = 4  # bytes of a value in a product: half precision becomes float32
LIBRARIES = 20 << 20  # code and tables of torch's kernels, which a process has in memory from their first use on: measured


@dataclass(frozen=True)
class Workload:
    """How much a run has to do, and with what."""

    tasks: int
    samples: int  # of each task
    batch: int  # samples in memory at a time
    on_gpu: bool = False
    device_budget: int = 0  # bytes of features that may wait on the GPU
    host_budget: int | None = None  # … and in the host's memory; None is as much as it takes
    ranks: int = 1  # processes that share the tasks
    drawn: int = 0  # bytes of samples that the caller keeps beside the run
    settings: Calibration = Calibration()

    @property
    def batches(self) -> dict[int, int]:
        """Sizes of one task's batches and how many there are of each, the first one first."""
        full, rest = divmod(self.samples, self.batch)
        return {size: count for size, count in ((self.batch, full), (rest, 1)) if size and count}

    @property
    def checked(self) -> int:
        """Samples on which the plan is checked."""
        return min(PROVING, next(iter(self.batches)))

    @property
    def held(self) -> float:
        """Share of the samples that choices are made on, where the settings hold some out."""
        return held_out(self.samples) / self.samples

    @property
    def ends(self) -> int:
        """How often the outputs of a site stand side by side: twice where α is still to be chosen."""
        return 2 if self.settings.interpolation == "auto" else 1

    @property
    def tasks_here(self) -> int:
        """Tasks of the process that has most."""
        return -(-self.tasks // self.ranks)


@dataclass(frozen=True)
class Needs:
    """What a run needs. Every mapping is of parts, by name, that add up."""

    work: Work  # of all processes
    phases: Mapping[str, Mapping[str, int]]  # bytes where the computation happens, at the worst block of each phase
    waiting: Mapping[str, int]  # bytes of features between blocks: "gpu", "host", "disk"
    folders: Mapping[str, int]  # bytes written beside them
    throughout: Mapping[str, int]  # bytes in the host's memory from beginning to end
    on_gpu: bool

    @property
    def peak_phase(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def gpu(self) -> int:
        """Bytes on the GPU; 0 without one."""
        return self.working + self.waiting["gpu"] if self.on_gpu else 0

    @property
    def host(self) -> int:
        """Bytes in the host's memory."""
        return self.waiting["host"] + sum(self.throughout.values()) + (0 if self.on_gpu else self.working)

    @property
    def disk(self) -> int:
        """Bytes on disk."""
        return self.waiting["disk"] + sum(self.folders.values())

    @property
    def working(self) -> int:
        """Bytes of the phase that needs most."""
        return sum(self.phases[self.peak_phase].values())


def needs(shapes: Mapping[int, ModelShape], load: Workload) -> Needs:
    """What a run needs of a model whose shape is known for every size of batch in `load.batches`, and for `load.checked`."""
    sizes = load.batches
    counts = Counter({shapes[size]: count * load.tasks for size, count in sizes.items()})
    checked = shapes[load.checked]
    largest = shapes[max(sizes)]
    waiting = features_waiting({shapes[size]: count * load.tasks_here for size, count in sizes.items()})
    return Needs(
        work=run_work(Done(counts, load.tasks, shapes[next(iter(sizes))], checked, load.settings, load.held, load.on_gpu)),
        phases={"check": checking(checked)} | phases(largest, load),
        waiting=shared_out(waiting, load),
        folders=folders(largest),
        throughout={"samples drawn": load.drawn, "code of libraries": LIBRARIES},
        on_gpu=load.on_gpu,
    )


def phases(shape: ModelShape, load: Workload) -> dict[str, dict[str, int]]:
    """The parts of the memory of every phase behind the check, each at the stack or block where it needs most."""

    def worst(candidates: list[dict[str, int]]) -> dict[str, int]:
        return max(candidates, key=lambda parts: sum(parts.values()))

    away = load.on_gpu or load.host_budget is not None  # where features come from; else they are part of what waits
    batch = batch_features(shape) if away else 0
    apart = load.settings.order == "sites"
    together = [(block, sites) for block in shape.blocks for sites in (zip(block.sites) if apart else [block.sites])]
    return {
        "start": worst([starting(shape, stack) for stack in shape.stacks]),
        "observe": worst([observing(block, sites, load) | {"batch": batch} for block, sites in together]),
        "solve": worst([solving(block, sites, at, load) for block, sites in together for at in range(len(sites))]),
        "advance": worst([advancing(block) | {"batch": batch} for block in shape.blocks]),
    }


def checking(shape: ModelShape) -> dict[str, int]:
    """The first samples through the whole merged model while the first expert is open."""
    blocks = max(block.weights for block in shape.blocks)
    return {"weights": shape.outside + blocks + shape.first, "working": shape.batch + shape.working}


def starting(shape: ModelShape, stack: StackShape) -> dict[str, int]:
    """Before the first block: what leads there, of one expert and of the student, all of which was needed for the check."""
    student = shape.outside if stack is shape.stacks[0] else stack.weights
    return {"weights": student + stack.weights, "working": shape.batch + stack.working}


def observing(block: BlockShape, sites: Sequence[SiteShape], load: Workload) -> dict[str, int]:
    """One task seen, for sites that are solved together: blocks of the student, its expert and the next expert, its moments, what
    earlier tasks added up to. A prior needs the base's block beside them, further sweeps the merged one.
    """
    several, settings = load.tasks_here > 1, load.settings
    blocks = (3 if several else 2) + bool(settings.prior) + (settings.sweeps > 1)
    additions = [addition_bytes(site, load.ends, bool(settings.prior)) for site in sites]
    return {
        "weights": blocks * block.weights,
        "moments": sum(moments_bytes(site) for site in sites),
        "systems": sum(system_bytes(site, load.ends) for site in sites) if several else 0,
        "working": max([observation_bytes(block, load.on_gpu), *additions]),
    }


def solving(block: BlockShape, sites: Sequence[SiteShape], at: int, load: Workload) -> dict[str, int]:
    """One site of all: blocks of the student and the base, systems that are left, weights and anchors, what is solved.

    What a step is chosen from stays beside the student's block.
    """
    solved, site, left = sites[:at], sites[at], sites[at:]
    return {
        "weights": (2 + (load.settings.sweeps > 1) + load.settings.holds_out) * block.weights,
        "systems": sum(system_bytes(each, load.ends) for each in left),
        "solutions": load.ends * sum(SUM * each.d * each.o for each in solved),
        # two weights, and twice in float64: the anchor and on the way to it
        "working": (2 * ROW + 2 * load.ends * SUM) * site.d * site.o,
    }


def advancing(block: BlockShape) -> dict[str, int]:
    """The solved block run once more."""
    return {"weights": block.weights, "working": block.working}


def moments_bytes(site: SiteShape) -> int:
    """Sums of one task: the Gram matrix, the cross moment, two means; what the residual stream lacks."""
    cross = site.d * (site.o if site.folded else site.d)
    return SUM * (site.d * site.d + cross + 2 * site.d + site.lagging * site.o)


def system_bytes(site: SiteShape, ends: int = 1) -> int:
    """Normal equations of one site: left, right, and the terms of the bias."""
    return SUM * (site.d * site.d + ends * site.d * site.o + site.d + ends * site.o)


def addition_bytes(site: SiteShape, ends: int = 1, prior: bool = False) -> int:
    """A task's moments becoming its share of the system: the expert's weight, as it is and in float64, and a new right side.

    Of a prior its own share of both sides, beside the task's, and the task vector.
    """
    right = site.d * site.o
    own = (ROW + SUM * (1 if site.folded else 2)) * right + (2 * ends - 1) * SUM * right * (ends > 1)
    return max(own, prior * SUM * (site.d * site.d + (2 + 2 * ends) * right))


def observation_bytes(block: BlockShape, on_gpu: bool = False) -> int:
    """One batch seen: what one track's modules read, and then a pass of the other's, or that of the other and the products."""
    products = max((product_bytes(site, on_gpu) + lag_bytes(site) for site in block.sites), default=0)
    return block.captured + max(block.working, block.captured + block.features + products)


def product_bytes(site: SiteShape, on_gpu: bool = False) -> int:
    """One batch at one site: weighed rows of both tracks, a product, and on a CPU the same in float64 before it is added."""
    width = site.o if site.folded else site.d
    rows = ROW * site.n * (site.d + width) if site.weighed else 0
    stripe = max(end - start for start, end in stripes(site.d, on_gpu))
    return rows + (ROW if on_gpu else ROW + SUM) * site.d * max(stripe, width)


def lag_bytes(site: SiteShape) -> int:
    """One batch: the residual streams of both models, and their difference on the way to the target."""
    return site.lagging * (2 * ROW + 3 * SUM) * site.n * site.o


def batch_features(shape: ModelShape) -> int:
    """Features of one batch on their way through a block, of both tracks."""
    return 2 * max(max(stack.features, *(block.features for block in stack.blocks)) for stack in shape.stacks)


def features_waiting(batches: Mapping[ModelShape, int]) -> int:
    """Features of all batches of one process, of both tracks, at the stack where they are most."""
    stacks = zip(*([batch_of(stack) * count for stack in shape.stacks] for shape, count in batches.items()), strict=True)
    return max(sum(parts) for parts in stacks)


def batch_of(stack: StackShape) -> int:
    """Features of one batch between the blocks of one stack, of both tracks."""
    return 2 * max(stack.features, *(block.features for block in stack.blocks))


def shared_out(waiting: int, load: Workload) -> dict[str, int]:
    """Where features wait: on the GPU within its budget, then in the host's memory within its own, the rest on disk."""
    gpu = min(waiting, load.device_budget) if load.on_gpu else 0
    host = waiting - gpu if load.host_budget is None else min(waiting - gpu, load.host_budget)
    return {"gpu": gpu, "host": host, "disk": waiting - gpu - host}


def folders(shape: ModelShape) -> dict[str, int]:
    """What is written: solved blocks as they come, the calibrated model, and twice the tensor that is being put into its file."""
    blocks = sum(block.weights for block in shape.blocks)
    return {"solved blocks": blocks, "calibrated model": shape.weights, "while joining": shape.largest}
