"""How a command shares the machine: threads sleep while they wait, and freed memory is returned.

Set in variables that torch's libraries read when they are loaded, so before torch is imported.
"""

import ctypes
import math
import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds per period, and the period
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}  # of GNU's and of Intel's OpenMP
MMAP_THRESHOLD = -3  # glibc's name for the size from which a block is mapped on its own
LARGE = 2 << 20


def share_machine() -> None:
    """Let waiting threads sleep, and limit their number to the container's share of the CPU.

    Spinning threads would keep the CPU from those they wait for, which slows neighbours down many
    times. Variables that are already set stay as they are.
    """
    for name, value in WAITING.items():
        os.environ.setdefault(name, value)
    allowed = processors_allowed()
    if allowed is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(min(allowed, len(os.sched_getaffinity(0)))))


def processors_allowed() -> int | None:
    """Return how many processors' time the container may use; None without a limit."""
    try:
        share, period = QUOTA.read_text().split()
    except (OSError, ValueError):
        return None
    return None if share == "max" else max(1, math.ceil(int(share) / int(period)))


def return_large_blocks() -> None:
    """Return freed blocks of 2 MiB and more to the system at once, unless the environment differs.

    Without it the memory of a run cannot be predicted. New pages cost up to a quarter more time on
    a CPU, so only processes of our own do this.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGE)
