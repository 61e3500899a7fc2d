"""Freed tensors go back to the system, so that a run holds what it needs and not what it once
needed.

Left to itself, glibc keeps freed blocks of up to 32 MiB for later, in pieces that what comes next
often does not fit into: runs then hold 1.0 to 1.8 times the bytes of their tensors, another amount
every time. Other systems are left as they are.
"""

import ctypes
import os

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
