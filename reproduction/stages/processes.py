"""Jobs that are measured: each alone in a process of its own, as many at a time as asked for.

They are forked from the server of workers.py, and each ends after its job, so that no job profits
from memory that another one left behind. What is measured begins after the imports.
"""

import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from featcal.errors import FeatCalError
from reproduction.stages.workers import console, from_a_server


def alone(
    label: str,
    function: Callable[..., Any],
    jobs: Mapping[str, tuple[Any, ...]],
    at_once: int,
    threads: int | None,
) -> Iterator[tuple[str, Any]]:
    """Results of `function(*jobs[name])` by name, as they come, with one progress line each.

    at_once: jobs side by side, started in their order.   threads: of torch in each; None leaves
    torch's own number.
    Raises: what a job raises; FeatCalError for one that ends without a word. Either ends the jobs
    still running.
    """
    context = from_a_server()
    waiting, done = deque(jobs.items()), 0
    running: dict[Connection, tuple[str, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                name, arguments = waiting.popleft()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_work, args=(theirs, threads, function, arguments), daemon=True
                )
                process.start()
                theirs.close()
                running[ours] = (name, process)
            for told in wait(list(running)):
                assert isinstance(told, Connection)  # of all that could be waited for
                name, process = running.pop(told)
                result = _received(told, name, process)
                done += 1
                console.print(f"{label} {done}/{len(jobs)}  {name}")
                yield name, result
    finally:
        for _, process in running.values():
            process.terminate()


def _work(
    tell: Connection, threads: int | None, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """What a process does: its one job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides, and ends it by SIGTERM
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)

    try:
        result = function(*arguments)
        tell.send((result, None))
    except Exception as error:
        tell.send((None, error))


def _received(told: Connection, name: str, process: Any) -> Any:
    """What a process has to say."""
    try:
        result, error = told.recv()
    except EOFError:
        process.join()
        raise FeatCalError(
            name,
            f"its process ended without a result (exit code {process.exitcode})",
            "without a message above it was probably short of memory: set `workers: 1` in the suite file, or",
            "take fewer samples",
        ) from None
    process.join()
    if error is not None:
        raise error
    return result
