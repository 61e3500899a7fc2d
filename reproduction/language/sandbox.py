"""Programs that a model wrote, run against tests in a process that is held short.

A fence against the mistakes of a small model (endless loops, memory, files, recursion), not against
an attacker. It is made of resource limits, an audit hook inside the same interpreter, and on Linux
a network namespace where the system allows one. Code
that is out to harm can get past an audit hook: run code of unknown origin in a virtual machine. Nor
is intent judged: an answer that equals everything passes a test of equality.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from featcal.errors import BadEnvironment

FENCE = Path(__file__).with_name("fence.py")


@dataclass(frozen=True)
class Program:
    """Source code, and the statements (asserts) that must run after it in the names it defines."""

    source: str
    tests: Sequence[str]


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    cpu_seconds: whole seconds of processor time; what decides on an idle and on a busy machine
    alike.
    seconds:     of the wall clock, for programs that wait.
    memory:      address space in bytes, the interpreter's own (about 30 MB) included; macOS has no
                 such bound, so that there a
                 program that fills memory is ended by its time only.
    """

    cpu_seconds: int = 1
    seconds: float = 10.0
    memory: int = 256 << 20


@dataclass(frozen=True)
class Outcome:
    """What became of a program; `detail` is where and why it failed, for people: it may differ
    between two runs.
    """

    state: Literal["passed", "failed", "timeout"]
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.state == "passed"


def run_programs(programs: Iterable[Program], limits: Limits | None = None) -> list[Outcome]:
    """Every program against its tests, in order, one after the other; what one does reaches neither
    the next nor this process.

    All share one interpreter without site-packages, environment or input, in an empty folder; each
    runs in a forked child that writes no file, opens no socket, starts no process, and whose output
    is thrown away. One that leaves early has not passed.
    Raises: BadEnvironment where the system has no such limits (Windows), or where even a harmless
    program fails behind them.
    """
    given, limits = list(programs), limits or Limits()
    if not given:
        return []
    require_fence()
    job = {
        "limits": asdict(limits),
        "programs": [{"source": p.source, "tests": list(p.tests)} for p in given],
    }
    longest = 60 + len(given) * (limits.seconds + 1)
    with tempfile.TemporaryDirectory(prefix="featcal-") as empty:
        command = [sys.executable, "-I", "-S", "-B", str(FENCE)]
        try:
            done = subprocess.run(
                command,
                input=json.dumps(job),
                capture_output=True,
                text=True,
                cwd=empty,
                env={},
                timeout=longest,
                check=True,
            )
        except subprocess.CalledProcessError as error:
            last = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
            raise _cannot_fence(
                f"the interpreter that runs programs ended before its time ({last})"
            ) from None
        except subprocess.TimeoutExpired:
            raise _cannot_fence(
                f"the interpreter that runs programs was silent for {longest:.0f} s"
            ) from None
    return [Outcome(state, detail) for state, detail in json.loads(done.stdout)]


def require_fence() -> None:
    """Raise BadEnvironment where the system cannot fork and limit processes."""
    if sys.platform == "win32":
        raise _cannot_fence("Windows has no limits of processor time and memory for a process")


def _cannot_fence(reason: str) -> BadEnvironment:
    way_out = "the scores that run programs (humaneval_plus, mbpp_plus) need Linux; WSL or a container will do"
    return BadEnvironment("programs that a model wrote", reason, way_out)
