"""Run independent jobs of one stage in worker processes of one thread each.

The same seed then gives the same bytes, and threads of busy processes do not wait for each other.
Python's fork server imports torch once; it may be forked as long as it has computed nothing.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver
from typing import Any

from rich.console import Console

from featcal.errors import FeatCalError

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's numbers of these options
Jobs = Mapping[str, tuple[Any, ...]]
console = Console(stderr=True, highlight=False)


def report_progress(name: str, line: object) -> None:
    console.print(f"  {name}  {line}", soft_wrap=True)


def _context() -> Any:
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if hasattr(context, "set_forkserver_preload"):
        context.set_forkserver_preload(["reproduction.engine.preload"])
    return context


def start_early() -> None:
    """Start the fork server now: it imports torch while the stage itself reads settings."""
    context = _context()
    if context.get_start_method() == "forkserver":
        forkserver.ensure_running()


def keep_freed_memory() -> None:
    """Make glibc keep freed blocks below 32 MiB: returning them costs a third of an evaluation."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt(TRIM_THRESHOLD, 1 << 30)
        mallopt(MMAP_THRESHOLD, 32 << 20)  # the maximum


def _start_worker(threads: int | None, fresh: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not fresh:
        keep_freed_memory()
        os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    from tqdm import tqdm

    if threads is not None:
        torch.set_num_threads(threads)
    tqdm.set_lock(threading.RLock())  # its own lock would outlast a worker that is terminated


def fan_out(
    label: str,
    function: Callable[..., Any],
    jobs: Jobs,
    workers: int,
    threads: int | None = 1,
    fresh: bool = False,
) -> Iterator[tuple[str, Any]]:
    """Yield the results of `function(*jobs[name])` by name, as they come; jobs start in their order.

    workers: processes; 0 runs the jobs here.   threads: of torch in each; None: torch's own number.
    fresh: every job has a process of its own.
    Raises: what a job raises, the others ended; FeatCalError for a process without a result.
    """
    if not workers:
        for done, (name, arguments) in enumerate(jobs.items(), start=1):
            result = function(*arguments)
            console.print(f"{label} {done}/{len(jobs)}  {name}")
            yield name, result
        return
    size, tasks = min(workers, len(jobs) or 1), 1 if fresh else None
    start = (_context(), _start_worker, (threads, fresh))
    pool = ProcessPoolExecutor(size, *start, max_tasks_per_child=tasks)
    try:
        futures = {pool.submit(function, *arguments): name for name, arguments in jobs.items()}
        for done, future in enumerate(as_completed(futures), start=1):
            result = future.result()
            console.print(f"{label} {done}/{len(jobs)}  {futures[future]}")
            yield futures[future], result
    except BaseException as error:
        for process in list(pool._processes.values()):  # the executor has no public way
            process.terminate()
        pool.shutdown(cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            cause = "without a message above it was probably short of memory: set `workers: 1` in the suite file, or"
            problem = "one of its processes ended without a result"
            raise FeatCalError(label, problem, cause, "take fewer samples") from None
        raise
    pool.shutdown()
