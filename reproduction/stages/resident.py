"""A process that has imported torch or papermill once, and forks every stage of a `dvc repro` that
needs it.

The imports take seconds of a core, and DVC starts each stage anew. The first stage starts this
process, and the others ask it
through a socket, named after what it imports and all that could make that stale: the package's
files, the environment's packages, Python, its variables. It ends by itself when nobody has asked
for a while. A stage behaves as if started where it was asked for: same folder, variables, terminal,
exit code and Ctrl-C; it ends when who asked is gone. Torch may be forked as long as it has computed
nothing.
"""

import atexit
import contextlib
import hashlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import featcal
import reproduction

TORCH = (
    "featcal", "featcal.baselines.training", "featcal.calibration.calibrate", "featcal.models.load", "reproduction.prepare.sources",
    "safetensors.torch", "transformers.models.clip.modeling_clip",
)  # fmt: skip
PAGES = ("reproduction.report.execute", "reproduction.stages.page", "papermill")
COMMANDS = "featcal.cli.main"
STAGE = "reproduction.stages.command"  # which the command line imports when it runs a stage
GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # of NVIDIA, of AMD, of either in WSL
AT_ONCE = ("pretrain", "gather", "summary")  # stages that import next to nothing
FORKED = "FEATCAL_FORKED_STAGE"  # set where a stage runs, so that it asks nobody again
IDLE = 20.0  # seconds without a stage after which the process ends
PATIENCE = 60.0  # seconds for the imports
READ_AT_IMPORT = (
    "PYTHON",
    "ATEN_",
    "ONEDNN_",
    "DNNL_",
    "OMP_",
    "MKL_",
    "KMP_",
    "MALLOC_",
    "TORCH",
    "LD_",
    "HF_",
)
LONGEST = 1 << 20  # bytes that are read of a question: arguments, folder and variables


def forked() -> bool:
    """Whether this process was forked from one that has the imports."""
    return FORKED in os.environ


def wanted() -> bool:
    """Whether to ask for a fork: in a stage that DVC runs, on Linux, which can pass descriptors.

    Not where there is a GPU: some import may look for it, and no fork of a process that has looked
    can use it.
    """
    gpu = any(Path(file).exists() for file in GPUS)
    return sys.platform == "linux" and "DVC_STAGE" in os.environ and not gpu and not forked()


def stage(arguments: Sequence[str]) -> int | None:
    """The exit code of a command line, run in a fork; None, with nothing run, where it is no stage
    that gains by it.
    """
    if (
        not wanted()
        or list(arguments[:1]) != ["stage"]
        or len(arguments) < 2
        or arguments[1] in AT_ONCE
    ):
        return None
    return ask(arguments, (COMMANDS, STAGE, *(PAGES if arguments[1] == "page" else TORCH)))


def address(imports: Sequence[str]) -> Path:
    """The socket of a process that has imported these modules as this one would."""
    files = sorted(
        file
        for package in (featcal, reproduction)
        for file in Path(package.__file__).parent.rglob("*.py")
    )
    told: list[Any] = [
        *imports,
        sys.executable,
        sys.version,
        os.stat(sysconfig.get_path("purelib")).st_mtime_ns,
    ]
    told += [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files]
    told += sorted(pair for pair in os.environ.items() if pair[0].startswith(READ_AT_IMPORT))
    name = hashlib.sha256(repr(told).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"featcal-{os.getuid()}", name)


def ask(arguments: Sequence[str], imports: Sequence[str]) -> int | None:
    """The exit code of `featcal ARGUMENTS` in a fork that has the imports; None where none could be
    had, and nothing was run.
    """
    try:
        line = _connected(address(imports), imports)
    except OSError:
        return None
    with line:
        told = {"arguments": list(arguments), "folder": os.getcwd(), "variables": dict(os.environ)}
        socket.send_fds(line, [json.dumps(told).encode()], [0, 1, 2])
        with _interrupts_for(line) as process:
            code = line.recv(32) if process else b""
    return int(code) if code else 1


@contextlib.contextmanager
def _interrupts_for(line: socket.socket) -> Iterator[int]:
    """The process at the other end, which gets every Ctrl-C meanwhile: its terminal is ours, its
    process group is not.
    """
    process, early = 0, False

    def forward(*_: Any) -> None:
        nonlocal early
        if process:
            os.kill(process, signal.SIGINT)
        early = not process

    ours = signal.getsignal(signal.SIGINT)
    if ours is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, forward)
    try:
        process = int(line.recv(32) or 0)
        if early:
            forward()
        yield process
    finally:
        signal.signal(signal.SIGINT, ours)


def _connected(path: Path, imports: Sequence[str]) -> socket.socket:
    """A line to the process at `path`, started where there is none. Raises: OSError."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if path.parent.stat().st_uid != os.getuid():
        raise PermissionError(f"{path.parent} belongs to somebody else")
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    started, end = None, time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            line.connect(str(path))
            return line
        except (FileNotFoundError, ConnectionRefusedError):
            if started is None:
                nothing = {
                    "stdin": subprocess.DEVNULL,
                    "stdout": subprocess.DEVNULL,
                    "stderr": subprocess.DEVNULL,
                }
                command = [
                    sys.executable,
                    "-P",
                    "-m",
                    "reproduction.stages.resident",
                    str(path),
                    *imports,
                ]
                started = subprocess.Popen(command, start_new_session=True, **nothing)
            elif started.poll() is not None:
                break
            time.sleep(0.02)
    raise ConnectionError(f"no process at {path}")


def serve(path: Path, imports: Sequence[str]) -> None:
    """Fork a stage for everyone who asks; a fork ends with the stage's exit code. Returns when
    nobody has asked for a while.
    """
    for name in imports:
        import_module(name)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path.unlink(missing_ok=True)
    listener.bind(str(path))
    listener.listen()
    with selectors.DefaultSelector() as events:
        events.register(listener, selectors.EVENT_READ)
        while found := events.select(None if len(events.get_map()) > 1 else IDLE):
            for key, _ in found:
                if key.data is None:
                    line = listener.accept()[0]
                    asked, descriptors, _, _ = socket.recv_fds(line, LONGEST, 3)
                    process = os.fork()
                    if not process:
                        listener.close()
                        line.close()
                        leave(_stage(json.loads(asked), descriptors))
                    for descriptor in descriptors:
                        os.close(descriptor)
                    line.send(str(process).encode())
                    job = (process, os.pidfd_open(process), line)
                    events.register(job[1], selectors.EVENT_READ, job)
                    events.register(line, selectors.EVENT_READ, job)
                elif key.fd in events.get_map():  # both descriptors of a job may be told at once
                    _end(key.data)
                    for one in key.data[1:]:
                        events.unregister(one)
                    os.close(key.data[1])
                    key.data[2].close()
    path.unlink(missing_ok=True)


def _stage(asked: Mapping[str, Any], descriptors: Sequence[int]) -> int:
    """Run what is asked for, in this fork, with the folder, variables and descriptors of who
    asked.
    """
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(asked["variables"] | {FORKED: "1"})
    os.chdir(asked["folder"])
    sys.argv = ["featcal", *asked["arguments"]]
    return command_line()


def command_line() -> int:
    """Run the arguments of this process as if it had been started with them."""
    code: int = import_module(COMMANDS).main()
    return code


def leave(code: int) -> NoReturn:
    """End this fork as multiprocessing ends its own: handlers of the end are called, the
    interpreter is not taken apart.

    That would walk through all that was imported, in pages that a fork has to copy before it frees
    them: two seconds a stage.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # threads that have still something to do, executors' among them
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # whoever read it may be gone
            stream.flush()
    os._exit(code)


def _end(job: tuple[int, int, socket.socket]) -> None:
    """Tell how a stage ended; where it still runs, who asked is gone, and it is ended."""
    process, _, line = job
    ended, status = os.waitpid(process, os.WNOHANG)
    if not ended:
        os.kill(process, signal.SIGTERM)
        os.waitpid(process, 0)
        return
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(OSError):
        line.send(str(code if code >= 0 else 128 - code).encode())


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2:])
