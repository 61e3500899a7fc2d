"""Stages forked from a process that has the imports behave as if started where they were asked
for.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from featcal.cli import start
from reproduction.stages import resident

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="stages are forked on Linux only")
# A server without the imports, whose command tells what it was given, sleeps, or returns the number
# it is asked for.
SERVER = """
import os, signal, sys, time
from pathlib import Path
from reproduction.stages import resident

def command_line():
    arguments = sys.argv[1:]
    try:
        print("begun", *arguments, os.getcwd(), os.environ.get("COLOUR"), resident.forked(), flush=True)
        time.sleep(float(arguments[1]))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        return 130
    return int(arguments[0])

signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background it is ignored
resident.command_line, resident.IDLE = command_line, float(sys.argv[2])
sys.exit(resident.serve(Path(sys.argv[1]), ()))
"""
CLIENT = """
import signal, sys
from pathlib import Path
from reproduction.stages import resident
signal.signal(signal.SIGINT, signal.default_int_handler)
resident.address = lambda imports: Path(sys.argv[1])
print("code", resident.ask(sys.argv[2:], ()))
"""
ASKED = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def server(tmp_path):
    """The socket of a server that ends when the test does."""
    path = tmp_path / "socket"
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(path), "30"], cwd="/")
    end = time.monotonic() + 30
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.02)
    yield path
    process.kill()
    process.wait()


def client(path, *arguments, **more):
    command = [sys.executable, "-c", CLIENT, str(path), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **more)


def begun(process):
    line = process.stdout.readline()
    assert line.startswith("begun"), line
    return line.split()[1:]


def test_a_stage_has_folder_variables_and_output_of_who_asked(server, tmp_path):
    process = client(server, "0", "0", cwd=tmp_path, env=os.environ | {"COLOUR": "red"})
    assert process.communicate(timeout=60)[0].splitlines() == [
        f"begun 0 0 {tmp_path} red True",
        "code 0",
    ]


@pytest.mark.parametrize("code", [2, 130])
def test_the_exit_code_comes_back(server, code):
    assert (
        client(server, str(code), "0").communicate(timeout=60)[0].splitlines()[-1] == f"code {code}"
    )


def test_a_fork_that_ends_leaves_nothing_undone(tmp_path):
    """Threads have ended, handlers were called, and what was printed has arrived; the interpreter
    is not taken apart.
    """
    code = """
import atexit, sys, threading, time
from reproduction.stages import resident
class Held:
    def __del__(self): print("taken apart", file=sys.stderr)
held = Held()
atexit.register(print, "handler")
threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
print("printed")
resident.leave(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split(), done.stderr) == (
        3,
        ["printed", "thread", "handler"],
        "",
    )


def test_two_stages_run_side_by_side(server):
    first, second = client(server, "3", "2"), client(server, "4", "0")
    assert second.communicate(timeout=60)[0].splitlines()[-1] == "code 4"
    assert first.communicate(timeout=60)[0].splitlines()[-1] == "code 3"


def test_ctrl_c_reaches_the_stage(server):
    process = client(server, "0", "60")
    begun(process)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[0].split() == ["interrupted", "code", "130"]


def test_ctrl_c_before_the_fork_is_known_reaches_it_too(tmp_path):
    """The one who answers waits: a Ctrl-C is then on its way before the number of a process is."""
    path, listener = tmp_path / "socket", socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with listener:
        listener.bind(str(path))
        listener.listen()
        process = client(path, "0", "60")
        line = listener.accept()[0]
        _, descriptors, _, _ = socket.recv_fds(line, resident.LONGEST, 3)
        time.sleep(0.2)  # it waits for the number
        process.send_signal(signal.SIGINT)
        with (
            subprocess.Popen(
                [sys.executable, "-c", ASKED], stdout=subprocess.PIPE, text=True
            ) as asked,
            line,
        ):
            assert asked.stdout.readline() == "ready\n"
            line.send(str(asked.pid).encode())
            assert asked.wait(timeout=30) == -signal.SIGINT
            line.send(b"130")
        for descriptor in descriptors:
            os.close(descriptor)
        assert process.communicate(timeout=30)[0].split() == ["code", "130"]


def test_a_stage_ends_when_who_asked_is_gone(server):
    process = client(server, "0", "60")
    begun(process)
    process.kill()
    assert process.stdout.read() == ""  # which waits until the stage, too, has let go of it
    assert client(server, "0", "0").communicate(timeout=60)[0].endswith("code 0\n")


def test_the_server_ends_by_itself_and_leaves_no_socket(tmp_path):
    path = tmp_path / "socket"
    done = subprocess.run([sys.executable, "-c", SERVER, str(path), "0.1"], timeout=60)
    assert done.returncode == 0 and not path.exists()


def test_the_first_to_ask_starts_it_and_none_is_asked_in_vain(tmp_path, monkeypatch):
    monkeypatch.setattr(resident, "address", lambda imports: tmp_path / "socket")
    monkeypatch.setattr(resident.sys, "executable", "/bin/false")
    assert resident.ask(["--version"], ()) is None


@pytest.mark.parametrize(
    "variable", ["OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR"]
)
def test_the_address_follows_files_and_variables(variable, tmp_path, monkeypatch):
    package = tmp_path / "featcal"
    package.mkdir()
    (package / "__init__.py").write_text("a = 1")
    monkeypatch.setattr(resident.featcal, "__file__", str(package / "__init__.py"))
    first = resident.address(())
    assert resident.address(()) == first
    monkeypatch.setenv(variable, "7")
    assert resident.address(()) != first
    monkeypatch.undo()
    monkeypatch.setattr(resident.featcal, "__file__", str(package / "__init__.py"))
    assert resident.address(()) == first
    assert resident.address(["json"]) != first
    (package / "more.py").write_text("")
    assert resident.address(()) != first


def test_only_stages_that_dvc_runs_without_a_gpu_ask(monkeypatch, tmp_path):
    monkeypatch.setattr(resident, "GPUS", (str(tmp_path / "gpu"),))
    monkeypatch.delenv(resident.FORKED, raising=False)
    monkeypatch.delenv("DVC_STAGE", raising=False)
    assert not resident.wanted()
    monkeypatch.setenv("DVC_STAGE", "merge@clip_b32-8")
    assert resident.wanted()
    (tmp_path / "gpu").touch()
    assert not resident.wanted()
    (tmp_path / "gpu").unlink()
    monkeypatch.setenv(resident.FORKED, "1")
    assert not resident.wanted() and resident.forked()


def test_stages_that_import_little_and_other_commands_are_run_where_they_are(monkeypatch):
    asked = []
    monkeypatch.setattr(resident, "GPUS", ())
    monkeypatch.setattr(
        resident, "ask", lambda arguments, imports: asked.append((arguments[1], set(imports))) or 0
    )
    monkeypatch.setenv("DVC_STAGE", "merge@clip_b32-8")
    monkeypatch.delenv(resident.FORKED, raising=False)
    for line in (["stage", "gather", "x"], ["stage"], ["merge", "average"], [], ["--version"]):
        assert resident.stage(line) is None
    assert (
        resident.stage(["stage", "merge", "clip_b32-8"])
        == resident.stage(["stage", "page", "table01"])
        == 0
    )
    (merge, torch), (page, papermill) = asked
    assert (
        merge == "merge"
        and set(resident.TORCH) < torch
        and page == "page"
        and "papermill" in papermill
    )
    assert not papermill & set(resident.TORCH)


def test_the_program_gives_a_stage_away_and_runs_all_else(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["featcal", "--version"])
    monkeypatch.setattr(resident, "stage", lambda arguments: 7 if "merge" in arguments else None)
    assert start.main() == 0 and capsys.readouterr().out.startswith("featcal ")
    monkeypatch.setattr(sys, "argv", ["featcal", "stage", "nonsense"])
    assert start.main() == 2 and "nonsense" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["featcal", "stage", "merge", "clip_b32-8"])
    assert start.main() == 7


def test_ctrl_c_before_the_stage_has_begun_is_one_message(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["featcal", "stage", "merge", "clip_b32-8"])
    monkeypatch.setattr(resident, "stage", interrupted)
    assert start.main() == 130 and "interrupted" in capsys.readouterr().err


def test_the_socket_lies_in_a_folder_of_this_user(tmp_path, monkeypatch):
    monkeypatch.setattr(resident.tempfile, "gettempdir", lambda: str(tmp_path))
    assert resident.address(()).parent == Path(tmp_path, f"featcal-{os.getuid()}")
