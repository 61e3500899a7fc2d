"""Entry point of the program `featcal`, which imports as little as possible.

torch's libraries read the variables for sharing the machine as they are loaded: set them first.
"""

import gc
import io
import os
import signal
import sys

QUOTA = "/sys/fs/cgroup/cpu.max"  # of a container: microseconds per period, and the period
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}  # of GNU's and of Intel's OpenMP

interrupts: list[object] = []  # signals: an import that one breaks may hide it, and fail later


def interrupt(*received: object) -> None:
    """Raise KeyboardInterrupt, and remember the signal."""
    interrupts.append(received)
    raise KeyboardInterrupt


def main() -> int:
    """Run this process's arguments and return the exit code; SIGTERM does what Ctrl-C does."""
    default_handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if default_handler:  # without a traceback while the command line is imported
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.set_threshold(10_000)  # not 700: importing torch takes half a second less
    share_machine()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may lack characters
        sys.stdout.reconfigure(errors="replace")
    from featcal.cli.main import CLOSED, INTERRUPTED, main

    if default_handler:
        signal.signal(signal.SIGINT, interrupt)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, interrupt)
    try:
        return main()
    except (KeyboardInterrupt, Exception):  # again, while it was reported; or a broken import
        if not interrupts:
            raise
        return INTERRUPTED
    except SystemExit:  # rich's, where nobody reads the output any more
        return CLOSED
    finally:  # nothing is left to interrupt
        gc.freeze()  # the collection at exit would take a second
        for sign in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sign, signal.SIG_IGN)


def share_machine() -> None:
    """Let waiting threads sleep, and limit their number to the container's share of the CPU."""
    for name, value in WAITING.items():
        os.environ.setdefault(name, value)
    try:
        with open(QUOTA) as file:
            share, period = file.read().split()
    except (OSError, ValueError):
        return
    if share != "max":
        allowed = max(1, -(-int(share) // int(period)))  # rounded up
        os.environ.setdefault("OMP_NUM_THREADS", str(min(allowed, len(os.sched_getaffinity(0)))))
