"""Independent jobs of one stage over one-thread worker processes.

The processes are forked from a server that has imported torch and the rest once, since every import
anew takes seconds of a core. Torch may be forked as long as it has computed nothing, and the server
never does; where the system has no such server (Windows), a process starts from nothing.

One thread each: with two threads in each of two busy processes a step took ten times as long
(spinning barriers), and a fixed thread count is what makes the same seed give the same bytes.
`workers: 0` runs the jobs here, one after the other.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_all_start_methods, get_context
from typing import Any

from rich.console import Console

from reproduction.stages.resident import TORCH, forked

TRIM_THRESHOLD, MMAP_THRESHOLD = (
    -1,
    -3,
)  # glibc's names for when freed memory goes back, and from where on it always does
console = Console(stderr=True, highlight=False)


def tell(name: str, line: object) -> None:
    """How far a job is."""
    console.print(f"  {name}  {line}", soft_wrap=True)


def from_a_server() -> Any:
    """What starts processes that have the imports behind them."""
    if forked():
        return get_context("fork")
    context: Any = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
    if hasattr(context, "set_forkserver_preload"):
        context.set_forkserver_preload(list(TORCH))
    return context


def keep_freed_memory() -> None:
    """From here on glibc hands no freed block below 32 MiB back to the system; what the environment
    says counts more.

    Left to itself it returns the top of the heap after many an activation, and every page of the
    next one is the kernel's work
    again: a third of the time of an evaluation on a CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt(TRIM_THRESHOLD, 1 << 30)
        mallopt(MMAP_THRESHOLD, 32 << 20)  # the most that it takes


def _start_worker() -> None:
    """One thread, no share in Ctrl-C (the parent decides, and ends it by SIGTERM), and freed memory
    kept for the next tensor.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    keep_freed_memory()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    from tqdm import tqdm

    torch.set_num_threads(1)
    tqdm.set_lock(
        threading.RLock()
    )  # its own lock lives in the system and would outlast a worker that is ended


def fan_out(
    label: str, function: Callable[..., Any], jobs: Mapping[str, tuple[Any, ...]], workers: int
) -> Iterator[tuple[str, Any]]:
    """Results of `function(*jobs[name])` by name, as they come, with one progress line each.

    On an exception, Ctrl-C included, the jobs not yet started are dropped and the running ones
    ended.
    """
    if not workers:
        for done, (name, arguments) in enumerate(jobs.items(), start=1):
            result = function(*arguments)
            console.print(f"{label} {done}/{len(jobs)}  {name}")
            yield name, result
        return
    pool = ProcessPoolExecutor(
        min(workers, len(jobs) or 1), mp_context=from_a_server(), initializer=_start_worker
    )
    try:
        futures: dict[Future[Any], str] = {
            pool.submit(function, *arguments): name for name, arguments in jobs.items()
        }
        for done, future in enumerate(as_completed(futures), start=1):
            result = future.result()
            console.print(f"{label} {done}/{len(jobs)}  {futures[future]}")
            yield futures[future], result
    except BaseException:
        for process in list(
            pool._processes.values()
        ):  # the executor has no public way to end a running job
            process.terminate()
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()
