"""What a run will need, from shapes alone: bytes on the device, on the host and on disk, and floating point operations.

Bytes are those of a run that streams: of every model only the current block is there. They count from what Python, torch and
the libraries of a GPU hold already. Legend: d inputs · o outputs · n rows of one site.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from featcal.calibration.shapes import BlockShape, ModelShape, SiteShape, StackShape
from featcal.calibration.work import Work, folded, run_work
from featcal.core.precision import SUM_DTYPE

SUM = SUM_DTYPE.itemsize
ROW = 4  # bytes of a value in a product: half precision becomes float32


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

    @property
    def batches(self) -> dict[int, int]:
        """Sizes of one task's batches and how many there are of each, the first one first."""
        full, rest = divmod(self.samples, self.batch)
        return {size: count for size, count in ((self.batch, full), (rest, 1)) if size and count}

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
        return self.waiting["host"] + (0 if self.on_gpu else self.working)

    @property
    def disk(self) -> int:
        """Bytes on disk."""
        return self.waiting["disk"] + sum(self.folders.values())

    @property
    def working(self) -> int:
        """Bytes of the phase that needs most."""
        return sum(self.phases[self.peak_phase].values())


def needs(shapes: Mapping[int, ModelShape], load: Workload) -> Needs:
    """What a run needs of a model whose shape is known for every size of batch in `load.batches`."""
    sizes = load.batches
    counts = Counter({shapes[size]: count * load.tasks for size, count in sizes.items()})
    largest = shapes[max(sizes)]
    waiting = features_waiting({shapes[size]: count * load.tasks_here for size, count in sizes.items()})
    return Needs(
        work=run_work(counts, shapes[next(iter(sizes))], load.tasks),
        phases=phases(largest, load),
        waiting=shared_out(waiting, load),
        folders=folders(largest),
        on_gpu=load.on_gpu,
    )


def phases(shape: ModelShape, load: Workload) -> dict[str, dict[str, int]]:
    """The parts of every phase's memory, each phase at the stack or block where it needs most."""

    def worst(candidates: list[dict[str, int]]) -> dict[str, int]:
        return max(candidates, key=lambda parts: sum(parts.values()))

    batch = batch_features(shape) if load.on_gpu else 0  # on the CPU it is part of what waits
    return {
        "check": checking(shape),
        "start": worst([starting(stack, shape.batch) for stack in shape.stacks]),
        "observe": worst([observing(block) | {"batch": batch} for block in shape.blocks]),
        "solve": worst([solving(block) for block in shape.blocks]),
        "advance": worst([advancing(block) | {"batch": batch} for block in shape.blocks]),
    }


def checking(shape: ModelShape) -> dict[str, int]:
    """The first batch through the whole merged model, what its blocks put out being kept to compare."""
    kept = sum(block.features for block in shape.blocks)
    return {
        "weights": shape.outside + max(block.weights for block in shape.blocks),
        "working": shape.batch + shape.working + kept,
    }


def starting(stack: StackShape, batch: int) -> dict[str, int]:
    """Before the first block: what leads there, of the student and of one expert, and one batch."""
    return {"weights": 2 * stack.weights, "working": batch + stack.working}


def observing(block: BlockShape) -> dict[str, int]:
    """One task seen: blocks of the student, its expert and the next expert, its moments, what earlier tasks added up to."""
    return {
        "weights": 3 * block.weights,
        "moments": sum(moments_bytes(site) for site in block.sites),
        "systems": sum(system_bytes(site) for site in block.sites),
        "working": observation_bytes(block),
    }


def solving(block: BlockShape) -> dict[str, int]:
    """All tasks added up: blocks of the student and the base, the systems, and the solutions that wait to be loaded."""
    return {
        "weights": 2 * block.weights,
        "systems": sum(system_bytes(site) for site in block.sites),
        "factor": max((site.d * site.d * SUM for site in block.sites), default=0),
        "solutions": sum(site.d * site.o * SUM for site in block.sites),
    }


def advancing(block: BlockShape) -> dict[str, int]:
    """The solved block run once more."""
    return {"weights": block.weights, "working": block.working}


def moments_bytes(site: SiteShape) -> int:
    """Sums of one task: the Gram matrix, the cross moment, two means."""
    cross = site.d * (site.o if folded(site) else site.d)
    return SUM * (site.d * site.d + cross + 2 * site.d)


def system_bytes(site: SiteShape) -> int:
    """Normal equations of one site: left, right, and the terms of the bias."""
    return SUM * (site.d * site.d + site.d * site.o + site.d + site.o)


def observation_bytes(block: BlockShape) -> int:
    """One batch seen: what both tracks' modules read, and then a pass of the second or the products of one site."""
    products = max((product_bytes(site) for site in block.sites), default=0)
    return max(block.working + block.captured, 2 * block.captured + products)


def product_bytes(site: SiteShape) -> int:
    """One batch at one site: weighted rows of both tracks, the product before it is added."""
    width = site.o if folded(site) else site.d
    return ROW * (site.n * (site.d + width) + site.d * max(site.d, width))


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
    """What is written: solved blocks as they come, the calibrated model, and the copy it is put together from."""
    return {"solved blocks": shape.weights - shape.outside, "calibrated model": shape.weights, "while joining": shape.weights}
