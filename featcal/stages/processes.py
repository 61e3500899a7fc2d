"""Jobs that are measured: each alone in a process of its own, as many at a time as asked for.

The processes are forked from a server that has imported torch and the rest once (a process that starts from nothing takes
seconds of imports, sixty-three times over), and each ends after its job, so that no job profits from memory that another one
left behind. Torch may be forked as long as it has computed nothing, and the server never does. Where the system has no such
server (Windows) a process starts from nothing; what is measured begins after the imports either way.
"""

import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from rich.console import Console

from featcal.errors import LostProcess

console = Console(stderr=True, highlight=False)
IMPORTED = [
    "featcal", "featcal.baselines.pool", "featcal.calibration.calibrate", "featcal.models.load", "featcal.suites.load_task",
    "safetensors.torch", "transformers.models.clip.modeling_clip",
]  # fmt: skip


def alone(
    label: str, function: Callable[..., Any], jobs: Mapping[str, tuple[Any, ...]], at_once: int, threads: int | None
) -> Iterator[tuple[str, Any]]:
    """Results of `function(*jobs[name])` by name, as they come, with one progress line each.

    at_once: jobs side by side, started in their order.   threads: of torch in each; None leaves torch's own number.
    Raises: what a job raises; LostProcess for one that ends without a word. Either ends the jobs still running.
    """
    context: Any = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
    if hasattr(context, "set_forkserver_preload"):
        context.set_forkserver_preload(IMPORTED)
    waiting, done = deque(jobs.items()), 0
    running: dict[Connection, tuple[str, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                name, arguments = waiting.popleft()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(theirs, threads, function, arguments), daemon=True)
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


def _work(tell: Connection, threads: int | None, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """What a process does: its one job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    try:
        tell.send((function(*arguments), None))
    except Exception as error:
        tell.send((None, error))


def _received(told: Connection, name: str, process: Any) -> Any:
    """What a process has to say."""
    try:
        result, error = told.recv()
    except EOFError:
        process.join()
        raise LostProcess(name, process.exitcode) from None
    process.join()
    if error is not None:
        raise error
    return result
