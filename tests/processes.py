"""Start processes that find each other as with torchrun, forked from a server with all loaded."""

import json
import multiprocessing
import os
import socket
import sys
from multiprocessing import forkserver

import pytest
import torch

from featcal.calibration.ranks import current, process_group

FORKS = multiprocessing.get_context("forkserver")


def start_server():
    """What the processes are forked from, with the files loaded whose functions they run."""
    FORKS.set_forkserver_preload(["featcal", "test_ranks", "test_resume"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a process."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
    return {name: str(value) for name, value in variables.items()} | {"MASTER_ADDR": "127.0.0.1"}


def member(work, rank, world, port, folder):
    """One process; writes what its work returned or raised."""
    os.environ.update(environment(rank, world, port))
    torch.set_num_threads(1)
    try:
        with process_group():
            end = {"result": work(current(), folder)}
    except Exception as error:
        end = {"error": type(error).__name__, "text": str(error)}
    (folder / f"{rank}.json").write_text(json.dumps(end))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(target, work, world, folder) -> list[int]:
    """Exit codes of `world` processes that all ran `target(work, rank, world, port, folder)`."""
    start_server()
    port = free_port()
    given = ((work, rank, world, port, folder) for rank in range(world))
    processes = [FORKS.Process(target=target, args=each) for each in given]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)  # on a busy machine
    hanging = [process for process in processes if process.is_alive()]
    for process in hanging:
        process.kill()
    assert not hanging
    return [process.exitcode for process in processes]


def together(work, world, folder) -> list[dict]:
    """Return what each process returned or raised from `work(ranks, folder)`; {} if killed."""
    run(member, work, world, folder)
    written = [folder / f"{rank}.json" for rank in range(world)]
    return [json.loads(path.read_text()) if path.exists() else {} for path in written]
