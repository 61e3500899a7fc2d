"""How the threads of a command share the machine, said in the variables that torch's libraries read
when they are loaded."""

import ctypes
import math
import os
from pathlib import Path

QUOTA = Path(
    "/sys/fs/cgroup/cpu.max"
)  # of a container: microseconds of processor time in a period, and the period
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}  # of GNU's and of Intel's OpenMP


def share_machine() -> None:
    """A thread that waits for others sleeps, and a container's share of processor time bounds how
    many there are.

    Threads that spin instead keep from the processor those that they wait for as soon as there are
    more than processors: a neighbour of the same kind then costs many times its share. Call it
    before torch is imported. What the environment says already counts more. OpenMP itself keeps to
    the processors that the process may run on (`taskset`).
    """
    for name, value in WAITING.items():
        os.environ.setdefault(name, value)
    allowed = processors_allowed()
    if allowed is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(min(allowed, len(os.sched_getaffinity(0)))))


def processors_allowed() -> int | None:
    """Whole processors' worth of time that the container may take; None where nothing bounds it."""
    try:
        share, period = QUOTA.read_text().split()
    except (OSError, ValueError):
        return None
    return None if share == "max" else max(1, math.ceil(int(share) / int(period)))


MMAP_THRESHOLD = -3  # glibc's name for the size from which on a block is the system's own
LARGE = 2 << 20


def give_back_large_blocks() -> None:
    """From here on this process gives blocks of 2 MiB and more back as they are freed; what its
    environment says counts more.

    Without it nobody could tell beforehand what a run takes. A page that is new every time costs
    time, up to a quarter more on a CPU, so this is for processes of our own whose memory matters.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGE)
