"""What a run costs: seconds, peak bytes, floating point operations. Nothing in here changes what is computed.

Operations are counted afterwards from the shapes of the batches that were read, on a copy of the model without numbers.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from featcal.blocks.plan import BlockPlan
from featcal.blocks.rehearsal import without_numbers
from featcal.calibration.shapes import ModelShape, model_shape
from featcal.calibration.work import Work, run_work
from featcal.core.weighting import TokenRule
from featcal.errors import FeatCalError
from featcal.settings import Calibration

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
PEAK, NOW = "VmHWM", "VmRSS"  # of a process's memory, in the words of Linux

Batch = Mapping[str, Any]
Signature = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Cost:
    """What one run took; it varies from run to run, so it lies beside results and never among them."""

    seconds: float
    peak_host_bytes: int | None  # above what the process held before; None where the system does not tell
    peak_device_bytes: int  # of torch's own memory on the GPU; 0 without one
    flops: int | None  # None for a model whose work depends on the numbers it is fed


@dataclass
class Meter:
    """Counts one run from `counting()` on."""

    started: float = field(default_factory=time.perf_counter)
    host_before: int | None = None
    seen: dict[Signature, Batch] = field(default_factory=dict)  # one batch without numbers of every kind
    counts: Counter[Signature] = field(default_factory=Counter)
    first: dict[str, Signature] = field(default_factory=dict)  # of every task

    def watched(self, batches: Mapping[str, Iterable[Batch]]) -> dict[str, Iterator[Batch]]:
        """The same batches, each noted by its shapes when it is read; to be read once."""
        return {task: self.noted(task, those) for task, those in batches.items()}

    def noted(self, task: str, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of one task."""
        for batch in batches:
            if isinstance(batch, Mapping):  # what it is otherwise is for the calibration to refuse
                kind = signature(batch)
                self.seen.setdefault(kind, shapes_only(batch))
                self.counts[kind] += 1
                self.first.setdefault(task, kind)
            yield batch

    def work(self, model: nn.Module, plan: BlockPlan, settings: Calibration, rule: TokenRule | None = None) -> Work:
        """Floating point operations of a whole run on the batches read. Raises: BadPlan where they depend on numbers."""
        bare = without_numbers(model).eval()
        shapes = {kind: model_shape(bare, plan, batch, norm=settings.norm, rule=rule) for kind, batch in self.seen.items()}
        batches: Counter[ModelShape] = Counter()
        for kind, count in self.counts.items():
            batches[shapes[kind]] += count
        return run_work(batches, shapes[self.first[min(self.first)]], tasks=len(self.first))

    def cost(self, model: nn.Module, plan: BlockPlan, settings: Calibration, rule: TokenRule | None = None) -> Cost:
        """What the run took until now."""
        seconds = time.perf_counter() - self.started
        host, device = peak_host(self.host_before), torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        try:
            flops = self.work(model, plan, settings, rule).total
        except FeatCalError:  # a model that cannot do without numbers is calibrated all the same
            flops = None
        return Cost(round(seconds, 3), host, device, flops)


@contextmanager
def counting() -> Iterator[Meter]:
    """A meter whose peaks begin here: the system's and torch's own records of a peak are set back."""
    try:
        RESET.write_text("5")
    except OSError:
        pass  # not Linux, or not allowed: `peak_host` then knows a new peak only by its being higher
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    yield Meter(host_before=memory(NOW))


def memory(word: str) -> int | None:
    """A line of the process's status in bytes; None where there is none."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{word}:")), None)


def peak_host(before: int | None) -> int | None:
    """Bytes by which the process has grown at most."""
    peak = memory(PEAK)
    return None if peak is None or before is None else max(0, peak - before)


def signature(batch: Batch) -> Signature:
    """What of a batch decides how much work it is: shapes and kinds of its tensors."""
    return tuple((name, (tuple(v.shape), v.dtype) if isinstance(v, Tensor) else repr(v)) for name, v in sorted(batch.items()))


def shapes_only(batch: Batch) -> Batch:
    """The batch without its numbers."""
    return {name: torch.empty_like(v, device="meta") if isinstance(v, Tensor) else v for name, v in batch.items()}
