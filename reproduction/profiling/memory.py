"""Resident memory of this process and of all it has started, as Linux tells it; elsewhere it is not
measured.

Knows nothing of time or of what is run.
"""

import os
from pathlib import Path

PROC = Path("/proc")
MIB = 2**20


def tree_bytes() -> int | None:
    """Bytes in memory of this process and its descendants, shared pages once for each; None where
    the system does not tell.
    """
    own = own_bytes()
    return (
        None
        if own is None
        else own + sum(_status(str(pid), "VmRSS") or 0 for pid in descendants(os.getpid()))
    )


def own_bytes() -> int | None:
    """Bytes in memory of this process alone."""
    return _status("self", "VmRSS")


def own_peak_bytes() -> int | None:
    """The most this process held since `forget_peak`, kept by the kernel, which misses nothing
    between two looks.
    """
    return _status("self", "VmHWM")


def forget_peak() -> None:
    """Let the kernel's record of this process's peak begin at what it holds now."""
    try:
        (PROC / "self/clear_refs").write_text("5")
    except OSError:
        # not Linux, or not allowed: then the peak is one since the start of the process, and never
        # too small
        pass


def descendants(ancestor: int) -> list[int]:
    """Processes started by one process, by those, and so on."""
    children: dict[int, list[int]] = {}
    for folder in PROC.glob("[0-9]*"):
        try:
            after_name = (
                (folder / "stat").read_text().rpartition(")")[2].split()
            )  # a name may hold blanks
        except OSError:
            continue  # ended while we looked
        children.setdefault(int(after_name[1]), []).append(int(folder.name))
    found, open_ = [], [ancestor]
    while open_:
        new = children.get(open_.pop(), [])
        found += new
        open_ += new
    return found


def _status(process: str, word: str) -> int | None:
    """A line of a process's status in bytes; None where there is none."""
    try:
        lines = (PROC / process / "status").read_text().splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{word}:")), None
    )
