"""A piece of work run under watch: seconds, peak memory above what was held before, energy.

A thread looks at the process tree and at the GPU five times a second. Looking takes about a
millisecond of one core.
"""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

from reproduction.profiling.memory import MIB, forget_peak, own_bytes, own_peak_bytes, tree_bytes
from reproduction.profiling.power import Watts, power_meter

T = TypeVar("T")
INTERVAL = 0.2  # seconds between two looks
JOULES = 3600  # in a watt-hour


@dataclass(frozen=True)
class Profile:
    """What a piece of work took.   memory_mib, energy_wh: None is "not measured", which is not the
    same as zero.
    """

    seconds: float
    memory_mib: float | None
    energy_wh: float | None


@dataclass
class Watch:
    """What was seen: the largest sum over the process tree, and the power at several times."""

    watts: Watts | None
    largest: int = 0  # bytes
    power: list[tuple[float, float]] = field(default_factory=list)  # seconds of the clock, watts
    end: threading.Event = field(default_factory=threading.Event)

    def look(self) -> None:
        """One look at memory and power."""
        self.largest = max(self.largest, tree_bytes() or 0)
        if self.watts is not None:
            self.power.append((time.perf_counter(), self.watts()))

    def keep_looking(self) -> None:
        """Look until told to end."""
        while not self.end.wait(INTERVAL):
            self.look()


def profiled(work: Callable[[], T], gpu: bool = False) -> tuple[T, Profile]:
    """What `work()` returns, and what it took.

    work: on a GPU it must end with its results on the host or on disk, so that the clock does not
    stop before the GPU does.
    gpu: whether the work is done there; only then is energy measured, since an idle GPU beside a
    CPU's work is no cost of it.
    """
    with ExitStack() as open_:
        watch = Watch(open_.enter_context(power_meter()) if gpu else None)
        looking = threading.Thread(target=watch.keep_looking, daemon=True)
        forget_peak()
        before, own_before = tree_bytes(), own_bytes()
        watch.look()
        looking.start()
        start = time.perf_counter()
        try:
            result = work()
            seconds = time.perf_counter() - start
        finally:
            watch.end.set()
            looking.join()
        watch.look()
    own_peak = own_peak_bytes()
    grown = None
    if before is not None and own_before is not None and own_peak is not None:
        grown = round(max(0, watch.largest - before, own_peak - own_before) / MIB, 1)
    return result, Profile(round(seconds, 3), grown, energy(watch.power))


def energy(power: list[tuple[float, float]]) -> float | None:
    """Watt-hours under a curve of (seconds, watts) by trapezoids; None without a curve."""
    if len(power) < 2:
        return None
    pairs = zip(power, power[1:], strict=False)
    return round(
        sum((later - sooner) * (a + b) / 2 for (sooner, a), (later, b) in pairs) / JOULES, 4
    )
