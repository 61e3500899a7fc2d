"""What a run costs: seconds, peak bytes, floating point operations. Nothing in here changes what is
computed.

Operations are counted afterwards from the shapes of the batches that were read, on a copy of the
model without numbers.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from featcal.blocks.batches import first_samples
from featcal.calibration.record import BlockRecord, Cost
from featcal.planning.block_shape import Asked
from featcal.planning.meta_profiler import to_meta
from featcal.planning.shapes import ModelShape, model_shape
from featcal.planning.work import Done, run_work

if TYPE_CHECKING:
    from featcal.calibration.stacks import Run

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
PEAK, NOW = "VmHWM", "VmRSS"  # of a process's memory, in the words of Linux

Batch = Mapping[str, Any]
Signature = tuple[tuple[str, Any], ...]


@dataclass
class Kind:
    """Batches of one task that are the same amount of work."""

    batch: Batch  # without numbers
    count: int = 0


Read = dict[Signature, Kind]  # in the order in which each kind came first


@dataclass
class Meter:
    """Counts one run from `counting()` on."""

    started: float = field(default_factory=time.perf_counter)
    host_before: int | None = None
    read: dict[str, Read] = field(default_factory=dict)  # by task

    def watched(self, batches: Mapping[str, Iterable[Batch]]) -> dict[str, Iterator[Batch]]:
        """The same batches, each noted by its shapes when it is read; to be read once."""
        return {task: self.noted(task, those) for task, those in batches.items()}

    def noted(self, task: str, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of one task."""
        for batch in batches:
            if isinstance(batch, Mapping):  # what it is otherwise is for the calibration to refuse
                kinds = self.read.setdefault(task, {})
                kinds.setdefault(signature(batch), Kind(shapes_only(batch))).count += 1
            yield batch

    def cost(self, run: "Run", blocks: Sequence[BlockRecord]) -> Cost:
        """What the run took until now; all processes call it together."""
        seconds = time.perf_counter() - self.started
        host, device = (
            peak_host(self.host_before),
            torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        )
        read = run.ranks.gathered(self.read)
        try:
            flops = run_work(done(run, blocks, read)).total
        # a model that cannot do without numbers is calibrated all the same; a count must not cost
        # the result
        except Exception:
            flops = None
        return Cost(round(seconds, 3), host, device, flops)


def done(run: "Run", blocks: Sequence[BlockRecord], read: Mapping[str, Read]) -> Done:
    """What a run did with the batches that were read, by task. Raises: BadPlan where that depends
    on numbers.
    """
    bare, plan = to_meta(run.models.student.module).eval(), run.models.plan
    kinds = {kind: each.batch for task in read.values() for kind, each in task.items()}
    asked = Asked.by(run.settings, run.token_weights)
    shapes = {kind: model_shape(bare, plan, batch, asked) for kind, batch in kinds.items()}
    batches: Counter[ModelShape] = Counter()
    for task in read.values():
        for kind, each in task.items():
            batches[shapes[kind]] += each.count
    first = next(iter(read[min(read)]))
    checked = model_shape(bare, plan, first_samples(kinds[first]), asked)
    tokens = {block.name: block.tokens for block in blocks}
    on_gpu = run.models.device.type == "cuda"
    stacks = () if run.block_drift else zip(plan.stacks, shapes[first].stacks, strict=True)
    more = (
        on_gpu,
        run.known,
        tokens,
        {shape.blocks[-1].name for stack, shape in stacks if not stack.feeds},
    )
    return Done(batches, len(read), shapes[first], checked, run.settings, *more)


@contextmanager
def counting() -> Iterator[Meter]:
    """A meter whose peaks begin here: the system's and torch's own records of a peak are set
    back.
    """
    try:
        RESET.write_text("5")
    except OSError:
        # not Linux, or not allowed: `peak_host` then knows a new peak only by its being higher
        pass
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    yield Meter(host_before=memory(NOW))


def memory(word: str) -> int | None:
    """A line of the process's status in bytes; None where there is none."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{word}:")), None
    )


def peak_host(before: int | None) -> int | None:
    """Bytes by which the process has grown at most."""
    peak = memory(PEAK)
    return None if peak is None or before is None else max(0, peak - before)


def signature(batch: Batch) -> Signature:
    """What of a batch decides how much work it is: shapes and kinds of its tensors."""
    return tuple(
        (name, (tuple(v.shape), v.dtype) if isinstance(v, Tensor) else repr(v))
        for name, v in sorted(batch.items())
    )


def shapes_only(batch: Batch) -> Batch:
    """The batch without its numbers."""
    return {
        name: torch.empty_like(v, device="meta") if isinstance(v, Tensor) else v
        for name, v in batch.items()
    }
