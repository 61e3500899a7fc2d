"""Programs under test: whatever one does, it is contained and counted as failed, and the next one
runs.
"""

import sys
from pathlib import Path

import pytest

from featcal.errors import BadEnvironment
from reproduction.language import sandbox
from reproduction.language.sandbox import Limits, Program, run_programs

GOOD = Program("def f(x):\n    return x + 1\n", ["assert f(1) == 2", "assert f(-1) == 0"])
QUICK = Limits(cpu_seconds=1, seconds=2.0)


def processes():
    """Command lines of what runs on this machine."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield entry.read_text().replace("\0", " ")
        except OSError:
            continue


CAUGHT = {
    "a wrong answer": ("def f(x):\n    return x", "failed", "test 1: AssertionError"),
    "a syntax error": ("def f(x) return x", "failed", "program: SyntaxError"),
    "no such function": ("def g(x):\n    return x + 1", "failed", "test 1: NameError"),
    "an endless loop": ("def f(x):\n    while True:\n        pass", "timeout", ""),
    "an endless loop that catches all": (
        "def f(x):\n    while True:\n        try:\n            f(x)\n        except BaseException:\n            pass",
        "timeout",
        "",
    ),
    "waiting": ("import time\ndef f(x):\n    time.sleep(60)", "timeout", "longer than 2.0 s"),
    "memory": ("def f(x):\n    return len([0] * 10**9)", "failed", "test 1: MemoryError"),
    "memory bit by bit": (
        "def f(x):\n    found = ['']\n    while True:\n        found.append(found[-1] + 'x' * 10**6)",
        "failed",
        "",
    ),
    "endless recursion": ("def f(x):\n    return f(x)", "failed", "RecursionError"),
    "forks": ("import os\nwhile True:\n    os.fork()", "failed", "os.fork is not allowed"),
    "a subprocess": ("import subprocess\nsubprocess.run(['true'])", "failed", "not allowed"),
    "a shell": ("import os\nos.system('true')", "failed", "os.system is not allowed"),
    "threads": (
        "import threading, time\nfor _ in range(9):\n    threading.Thread(target=time.sleep, args=(60,)).start()",
        "failed",
        "",
    ),
    "a socket": ("import socket\nsocket.socket()", "failed", "socket.__new__ is not allowed"),
    "a name looked up": (
        "import socket\nsocket.getaddrinfo('localhost', 80)",
        "failed",
        "not allowed",
    ),
    "a file written": ("open('here', 'w').write('x')", "failed", "files are not available"),
    "a file written below open": (
        "import os\nos.open('here', os.O_CREAT | os.O_WRONLY)",
        "failed",
        "files are not available",
    ),
    "a file read": ("open('/etc/passwd').read()", "failed", "files are not available"),
    "a file removed": ("import os\nos.remove('nothing')", "failed", "os.remove is not allowed"),
    "foreign code": ("import ctypes\nctypes.CDLL(None).getpid()", "failed", "not allowed"),
    "another process": ("import os\nos.kill(os.getppid(), 9)", "failed", "os.kill is not allowed"),
    "raised limits": ("import resource\nresource.setrlimit(0, (9, 9))", "failed", "not allowed"),
    "leaving": ("import sys\nsys.exit(0)", "failed", "program: SystemExit"),
    "leaving without notice": ("import os\nos._exit(0)", "failed", "left without a word"),
    "leaving inside a test": ("def f(x):\n    raise SystemExit(0)", "failed", "test 1: SystemExit"),
    "a crash": ("import os\nos.abort()", "failed", "ended by SIGABRT"),
    "another error for assert": (
        "import builtins\nbuiltins.AssertionError = int\ndef f(x):\n    return x",
        "failed",
        "test 1",
    ),
    "the tests as a name": ("def f(x):\n    return tests", "failed", "test 1: NameError"),
    "the tests among all objects": (
        "import gc\ngc.get_objects()",
        "failed",
        "gc.get_objects is not allowed",
    ),
    "words on every channel": (
        "import os\nfor n in range(64):\n    try:\n        os.write(n, b'passed')\n    except OSError:\n        pass\n",
        "failed",
        "",
    ),
    "an error that cannot be told": (
        "class E(Exception):\n    def __str__(self):\n        raise ValueError\ndef f(x):\n    raise E",
        "failed",
        "test 1: E",
    ),
    "input": ("def f(x):\n    return input()", "failed", "EOFError"),
}


def test_all_is_contained_and_the_next_program_runs(monkeypatch):
    monkeypatch.setenv("SECRET", "of the surroundings")
    programs = [
        part for source, _, _ in CAUGHT.values() for part in (Program(source, GOOD.tests), GOOD)
    ]
    found = run_programs(programs, QUICK)
    assert [outcome.state for outcome in found[1::2]] == ["passed"] * len(CAUGHT)
    for (name, (_, state, detail)), outcome in zip(CAUGHT.items(), found[::2], strict=True):
        assert outcome.state == state and detail in outcome.detail, f"{name}: {outcome}"


def test_what_a_harmless_program_needs_is_there():
    helpful = """
import collections, dataclasses, functools, itertools, math, random, re, string, typing
from collections import Counter, namedtuple
Point = namedtuple("Point", "x y")
def f(text):
    print("much to say " * 100000)
    return sorted(Counter(re.findall("[a-z]+", text)).items())
"""
    tests = [
        "assert f('b a b') == [('a', 1), ('b', 2)]",
        "import heapq\nassert heapq.nlargest(1, [3, 5]) == [5]",
    ]
    assert run_programs([Program(helpful, tests)]) == [sandbox.Outcome("passed")]


def test_environment_folder_and_packages_are_not_handed_on(monkeypatch):
    monkeypatch.setenv("SECRET", "of the surroundings")
    looking = "import os, sys\nsecret = dict(os.environ).get('SECRET')\nhere = os.listdir('.')\npaths = sys.path\n"
    tests = [
        "assert secret is None",
        "assert here == []",
        "assert not any('site-packages' in p for p in paths)",
    ]
    assert run_programs([Program(looking, tests)])[0].passed


def test_a_system_without_limits_is_told(monkeypatch):
    monkeypatch.setattr(sandbox.sys, "platform", "win32")
    with pytest.raises(BadEnvironment, match="Windows has no limits"):
        run_programs([GOOD])


def test_an_interpreter_that_ends_early_is_told(tmp_path, monkeypatch):
    broken = tmp_path / "fence.py"
    broken.write_text("raise SystemExit('gone')")
    monkeypatch.setattr(sandbox, "FENCE", broken)
    with pytest.raises(BadEnvironment, match="ended before its time \\(gone\\)"):
        run_programs([GOOD])


def test_limits_that_let_nothing_run_are_told_instead_of_failing_every_program():
    with pytest.raises(BadEnvironment, match="a harmless program does not run behind these limits"):
        run_programs([GOOD], Limits(seconds=0))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_no_child_is_left_behind():
    run_programs([Program("import time\ntime.sleep(60)", []), GOOD], Limits(seconds=0.3))
    assert not [line for line in processes() if str(sandbox.FENCE) in line]
