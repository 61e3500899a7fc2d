"""Measure time, memory and energy of a piece of work.

A thread samples the process tree and the GPU five times a second; a sample takes about a
millisecond of one core. Power is that of torch's first GPU, which torch reads with the package
nvidia-ml-py (extra `gpu`).
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
MIB = 2**20
INTERVAL = 0.2  # seconds between two samples
JOULES = 3600  # in a watt-hour


@dataclass(frozen=True)
class Profile:
    """The cost of a piece of work. energy_wh: None if not measured."""

    seconds: float
    memory_mib: float
    energy_wh: float | None


@dataclass
class Watch:
    """The largest memory of the process tree, and the power of a GPU over time."""

    gpu: bool
    largest: int = 0  # bytes
    power: list[tuple[float, float]] = field(default_factory=list)  # seconds of the clock, watts
    end: threading.Event = field(default_factory=threading.Event)

    def sample(self) -> None:
        self.largest = max(self.largest, tree_bytes())
        if self.gpu and (watts := power_draw()) is not None:
            self.power.append((time.perf_counter(), watts))

    def keep_sampling(self) -> None:
        while not self.end.wait(INTERVAL):
            self.sample()


def profiled(work: Callable[[], T], gpu: bool = False) -> tuple[T, Profile]:
    """Return the result of `work()` and its cost.

    work: on a GPU it must end with its results on the host or on disk, so that the clock does not
    stop before the GPU does.
    gpu: measure energy as well; work on the CPU is not charged for an idle GPU.
    """
    import psutil

    watch = Watch(gpu)
    sampling = threading.Thread(target=watch.keep_sampling, daemon=True)
    with suppress(OSError):  # not Linux, or not allowed: the peak since the process started
        Path("/proc/self/clear_refs").write_text("5")
    before, own_before = tree_bytes(), psutil.Process().memory_info().rss
    watch.sample()
    sampling.start()
    start = time.perf_counter()
    try:
        result = work()
        seconds = time.perf_counter() - start
    finally:
        watch.end.set()
        sampling.join()
    watch.sample()
    grown = max(0, watch.largest - before, own_peak_bytes() - own_before)
    return result, Profile(round(seconds, 3), round(grown / MIB, 1), energy(watch.power))


def tree_bytes() -> int:
    """Return the resident memory of this process and its descendants."""
    import psutil

    process = psutil.Process()
    size = process.memory_info().rss
    for child in process.children(recursive=True):
        with suppress(psutil.Error):  # ended in the meantime
            size += child.memory_info().rss
    return int(size)


def own_peak_bytes() -> int:
    """Return the peak resident memory of this process as the kernel counts it; 0 if unknown.

    The kernel misses no peak between two samples. psutil does not read this counter.
    """
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def power_draw() -> float | None:
    """Return the watts of torch's first GPU; None without package, driver, GPU or sensor."""
    import torch

    try:
        return torch.cuda.power_draw(0) / 1000  # NVML counts milliwatts
    except Exception:  # NVML's errors are of a package that may be missing
        return None


def energy(power: list[tuple[float, float]]) -> float | None:
    """Return the watt-hours under a curve of (seconds, watts) by trapezoids; None for no curve."""
    if len(power) < 2:
        return None
    pairs = zip(power, power[1:], strict=False)
    joules = sum((later - sooner) * (a + b) / 2 for (sooner, a), (later, b) in pairs)
    return round(joules / JOULES, 4)
