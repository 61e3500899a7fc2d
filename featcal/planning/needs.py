"""What a run will need, from shapes alone: bytes on the device, on the host and on disk, and
floating point operations.

Bytes are those of a run that streams: of every model only the current block is there. What Python
and torch hold already comes
on top, and so does freed memory that a process keeps: `featcal calibrate` gives it back
(cli/allocator.py), callers of the library may not. Held against real runs on CPUs; those of a GPU
are the same sums, which nobody has measured.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from featcal.planning.memory import checking, phases
from featcal.planning.shapes import ModelShape
from featcal.planning.work import Done, Work, run_work
from featcal.planning.workload import Workload

LIBRARIES = (
    42 << 20
    # measured: 28 of torch's code, in memory from its first use on; the rest its tables and Python's
    # objects
)


@dataclass(frozen=True)
class Needs:
    """What a run needs. Every mapping is of parts, by name, that add up."""

    work: Work  # of all processes
    phases: Mapping[
        str, Mapping[str, int]
    ]  # bytes where the computation happens, at the worst block of each phase
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
        return (
            self.waiting["host"]
            + sum(self.throughout.values())
            + (0 if self.on_gpu else self.working)
        )

    @property
    def disk(self) -> int:
        """Bytes on disk."""
        return self.waiting["disk"] + sum(self.folders.values())

    @property
    def working(self) -> int:
        """Bytes of the phase that needs most."""
        return sum(self.phases[self.peak_phase].values())


def needs(shapes: Mapping[int, ModelShape], load: Workload) -> Needs:
    """What a run needs of a model whose shape is known for every size of batch in `load.batches`,
    and for `load.checked`.
    """
    sizes = load.batches
    counts = Counter({shapes[size]: count * load.tasks for size, count in sizes.items()})
    checked = shapes[load.checked]
    largest = shapes[max(sizes)]
    waiting = features_waiting(
        {shapes[size]: count * load.tasks_here for size, count in sizes.items()}
    )
    first = shapes[next(iter(sizes))]
    done = Done(counts, load.tasks, first, checked, load.settings, load.on_gpu)
    return Needs(
        work=run_work(done),
        phases={"check": checking(checked)} | phases(largest, load),
        waiting=shared_out(waiting, load),
        folders=folders(largest),
        throughout={"samples drawn": load.drawn, "code of libraries": LIBRARIES},
        on_gpu=load.on_gpu,
    )


def features_waiting(batches: Mapping[ModelShape, int]) -> int:
    """Features of all batches of one process, of both tracks, at the stack where they are most."""
    stacks = zip(
        *([stack.between * count for stack in shape.stacks] for shape, count in batches.items()),
        strict=True,
    )
    return max(sum(parts) for parts in stacks)


def shared_out(waiting: int, load: Workload) -> dict[str, int]:
    """Where features wait: on the GPU within its budget, then in the host's memory within its own,
    the rest on disk.
    """
    gpu = min(waiting, load.device_budget) if load.on_gpu else 0
    host = waiting - gpu if load.host_budget is None else min(waiting - gpu, load.host_budget)
    return {"gpu": gpu, "host": host, "disk": waiting - gpu - host}


def folders(shape: ModelShape) -> dict[str, int]:
    """What is written: solved blocks as they come, the calibrated model, and twice the tensor that
    is being put into its file.
    """
    blocks = sum(block.weights for block in shape.blocks)
    return {
        "solved blocks": blocks,
        "calibrated model": shape.weights,
        "while joining": shape.largest,
    }
