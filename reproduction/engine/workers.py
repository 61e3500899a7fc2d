"""Independent jobs of one stage in one-thread worker processes, and measured jobs, each alone.

One thread each: with two threads in each of two busy processes a step took ten times as long, and a
fixed thread count makes the same seed give the same bytes. Workers are forked from Python's own
fork server, which imports torch once; torch may be forked as long as it has computed nothing.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

from rich.console import Console

from featcal.errors import FeatCalError

IMPORTS = [
    "featcal.baselines.training", "featcal.calibration.calibrate", "featcal.models.load", "reproduction.prepare.sources",
    "safetensors.torch", "transformers.models.clip.modeling_clip",
]  # fmt: skip
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's numbers of these options
Jobs = Mapping[str, tuple[Any, ...]]
console = Console(stderr=True, highlight=False)


def report_progress(name: str, line: object) -> None:
    """Print the progress of a job."""
    console.print(f"  {name}  {line}", soft_wrap=True)


def _context() -> Any:
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if hasattr(context, "set_forkserver_preload"):
        context.set_forkserver_preload(IMPORTS)
    return context


def start_early() -> None:
    """Start the fork server now: it imports torch while the stage itself reads settings."""
    context = _context()
    if context.get_start_method() == "forkserver":
        forkserver.ensure_running()


def keep_freed_memory() -> None:
    """Make glibc keep freed blocks below 32 MiB, unless the environment configures malloc.

    Otherwise it returns them after many an activation, which costs a third of an evaluation's time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt(TRIM_THRESHOLD, 1 << 30)
        mallopt(MMAP_THRESHOLD, 32 << 20)  # the maximum


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _start_worker() -> None:
    _leave_interrupts_to_the_parent()
    keep_freed_memory()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    from tqdm import tqdm

    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # its own lock would outlast a worker that is terminated


def fan_out(
    label: str, function: Callable[..., Any], jobs: Jobs, workers: int
) -> Iterator[tuple[str, Any]]:
    """Yield the results of `function(*jobs[name])` by name, as they come.

    workers: processes; 0 runs the jobs here, one after the other.
    On an exception, Ctrl-C included, running jobs are terminated and the others dropped.
    """
    if not workers:
        for done, (name, arguments) in enumerate(jobs.items(), start=1):
            result = function(*arguments)
            console.print(f"{label} {done}/{len(jobs)}  {name}")
            yield name, result
        return
    size = min(workers, len(jobs) or 1)
    pool = ProcessPoolExecutor(size, mp_context=_context(), initializer=_start_worker)
    try:
        futures: dict[Future[Any], str] = {
            pool.submit(function, *arguments): name for name, arguments in jobs.items()
        }
        for done, future in enumerate(as_completed(futures), start=1):
            result = future.result()
            console.print(f"{label} {done}/{len(jobs)}  {futures[future]}")
            yield futures[future], result
    except BaseException:
        for process in list(pool._processes.values()):  # the executor has no public way
            process.terminate()
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


def alone(
    label: str, function: Callable[..., Any], jobs: Jobs, n_jobs: int, threads: int | None
) -> Iterator[tuple[str, Any]]:
    """Yield the results of `function(*jobs[name])` by name, each from a process of its own.

    No job reuses memory of another. n_jobs: jobs at the same time, started in their order.
    threads: of torch in each; None: torch's own number.
    Raises: what a job raises; FeatCalError for one that ends without a result.
    """
    context, waiting, done = _context(), deque(jobs.items()), 0
    running: dict[Connection, tuple[str, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < n_jobs:
                name, arguments = waiting.popleft()
                ours, theirs = context.Pipe(duplex=False)
                given = (theirs, threads, function, arguments)
                process = context.Process(target=_run_one, args=given, daemon=True)
                process.start()
                theirs.close()
                running[ours] = (name, process)
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                name, process = running.pop(ready)
                result = _received(ready, name, process)
                done += 1
                console.print(f"{label} {done}/{len(jobs)}  {name}")
                yield name, result
    finally:
        for _, process in running.values():
            process.terminate()


def _run_one(
    out: Connection, threads: int | None, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    _leave_interrupts_to_the_parent()
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    try:
        out.send((function(*arguments), None))
    except Exception as error:
        out.send((None, error))


def _received(ready: Connection, name: str, process: Any) -> Any:
    try:
        result, error = ready.recv()
    except EOFError:
        process.join()
        problem = f"its process ended without a result (exit code {process.exitcode})"
        cause = "without a message above it was probably short of memory: set `workers: 1` in the suite file, or"
        raise FeatCalError(name, problem, cause, "take fewer samples") from None
    process.join()
    if error is not None:
        raise error
    return result
