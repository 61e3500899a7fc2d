"""Entry point of the program `featcal`, which imports as little as possible.

A command shares the machine: its threads sleep while they wait, and freed memory is returned.
torch's libraries read the variables for this when they are loaded, so they are set first.
"""

import ctypes
import math
import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds per period, and the period
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}  # of GNU's and of Intel's OpenMP
MMAP_THRESHOLD = -3  # glibc's name for the size from which a block is mapped on its own


def main() -> int:
    """Run this process's arguments and return the exit code."""
    share_machine()
    try:
        from featcal.cli.main import main

        return main()
    except KeyboardInterrupt:  # while the command line itself is imported
        return 130


def share_machine() -> None:
    """Let waiting threads sleep, and limit their number to the container's share of the CPU.

    Spinning threads take CPU time from the threads they wait for, which makes other processes many
    times slower. Variables that are already set stay as they are.
    """
    for name, value in WAITING.items():
        os.environ.setdefault(name, value)
    try:
        share, period = QUOTA.read_text().split()
    except (OSError, ValueError):
        return
    if share != "max":
        allowed = max(1, math.ceil(int(share) / int(period)))
        os.environ.setdefault("OMP_NUM_THREADS", str(min(allowed, len(os.sched_getaffinity(0)))))


def return_large_blocks() -> None:
    """Return freed blocks of 2 MiB and more to the system at once, unless the environment differs.

    Otherwise the memory of a run cannot be predicted. New pages cost up to a quarter more time on a
    CPU, so only processes of our own do this.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt(MMAP_THRESHOLD, 2 << 20)
