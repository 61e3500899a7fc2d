"""Run inside the sandbox's own interpreter: one limited child per program, forked, each in a
process group of its own.

Standard library only, and no import of featcal: started by path with `python -I -S`. Reads one JSON
object from standard input, writes one to standard output; `reproduction.language.sandbox` is the
other side and tells what this is and what it is not.
"""

import ctypes
import json
import os
import resource
import secrets
import select
import signal
import sys
import sysconfig
import time
from contextlib import suppress

# whatever starts a process, reaches a network or another process, changes files, or looks for
# objects of the surrounding program
REFUSED = (
    "code.", "ctypes.", "fcntl.", "gc.", "mmap.", "msvcrt.", "os.chflags", "os.chmod", "os.chown", "os.exec", "os.fork",
    "os.kill", "os.link", "os.lockf", "os.mkdir", "os.posix_spawn", "os.putenv", "os.remove", "os.rename", "os.rmdir",
    "os.setxattr", "os.spawn", "os.startfile", "os.symlink", "os.system", "os.truncate", "os.unsetenv", "os.utime", "pty.",
    "resource.", "shutil.", "signal.", "socket.", "sqlite3.", "subprocess.", "syslog.", "tempfile.", "urllib.", "webbrowser.",
)  # fmt: skip
NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET of linux/sched.h
END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of linux/prctl.h
DETAIL = 200  # characters of an error that are kept


# the standard library's files are the only ones that can be read; looked up once, since that takes
# milliseconds
LIBRARY = tuple(
    {f"{os.path.realpath(sysconfig.get_path(name))}{os.sep}" for name in ("stdlib", "platstdlib")}
)


def of_linux(function: str, *arguments: int) -> bool:
    """Call a function of Linux's C library; False where it does not exist or the system does not
    allow it.
    """
    try:
        return getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments) == 0
    except (OSError, AttributeError):
        return False


def forbid() -> None:
    """From here on this process reads the standard library's files only, and none of REFUSED
    happens in it.
    """
    library = LIBRARY
    refused, real, error = REFUSED, os.path.realpath, PermissionError
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def hook(event: str, arguments: tuple) -> None:
        if event.startswith(refused):
            raise error(f"{event} is not allowed here")
        if event == "open":
            path, _, flags = arguments
            if flags & writing or not (type(path) is str and real(path).startswith(library)):
                raise error("files are not available here")

    sys.addaudithook(hook)


def limit(limits: dict) -> None:
    """Bounds of this process: processor seconds, address space in bytes, no file written, few open
    files, no core dump.
    """
    none = {"RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0}
    bounds = {
        "RLIMIT_CPU": limits["cpu_seconds"],
        "RLIMIT_AS": limits["memory"],
        "RLIMIT_NOFILE": 32,
        **none,
    }
    for name, bound in bounds.items():
        hard = bound + (
            name == "RLIMIT_CPU"
        )  # the soft bound ends the process with a signal that tells why
        try:
            resource.setrlimit(getattr(resource, name), (bound, hard))
        except (ValueError, OSError):
            if (sys.platform, name) != (
                "darwin",
                "RLIMIT_AS",
            ):  # macOS knows the name, but bounds no memory
                raise


def child(source: str, tests: list, limits: dict, report: int, token: str) -> None:
    """Run a program, then its tests in the names it defined; tell the other side how it went, and
    end.
    """
    os.setsid()
    of_linux("prctl", END_WITH_PARENT, signal.SIGKILL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.closerange(3, report)
    os.closerange(report + 1, 256)
    limit(limits)
    write, leave, text = os.write, os._exit, str
    forbid()
    names = {"__name__": "program", "__builtins__": __builtins__}
    place = "program"
    try:
        exec(compile(source, "program", "exec"), names)
        for number, test in enumerate(tests, start=1):
            place = f"test {number}"
            exec(compile(test, place, "exec"), names)
        said = token
    except (
        BaseException
    ) as problem:  # SystemExit and KeyboardInterrupt included: a program that leaves has not passed
        try:
            said = f"{place}: {type(problem).__name__}: {text(problem)}"[:DETAIL]
        except BaseException:
            said = f"{place}: {type(problem).__name__}"
    write(report, said.encode("utf-8", "replace"))
    leave(0)


def run(source: str, tests: list, limits: dict) -> tuple:
    """State and detail of one program: passed, failed, or timeout."""
    reading, writing = os.pipe()
    token = secrets.token_hex(16)
    process = os.fork()
    if not process:
        try:
            child(source, tests, limits, writing, token)
        finally:
            os._exit(1)
    os.close(writing)
    said, late = heard(reading, time.monotonic() + limits["seconds"])
    os.close(reading)
    for kill, target in (
        (os.killpg, process),
        (os.kill, process),
    ):  # by number too: it may not have made its group yet
        with suppress(ProcessLookupError, PermissionError):
            kill(target, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    if said == token:
        return "passed", ""
    ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if said:
        return "failed", said
    if late or ended == signal.SIGXCPU:
        return "timeout", f"longer than {limits['seconds'] if late else limits['cpu_seconds']} s"
    return "failed", f"ended by {signal.Signals(ended).name}" if ended else "left without a word"


def heard(reading: int, until: float) -> tuple:
    """What a child has written by the time it closed its end, and whether time ran out before it
    did.
    """
    said = b""
    while (left := until - time.monotonic()) > 0:
        if not select.select([reading], [], [], left)[0]:
            break
        part = os.read(reading, 4096)
        if not part or len(said) > 4096:
            return said[:4096].decode("utf-8", "replace"), False
        said += part
    return said.decode("utf-8", "replace"), True


def main() -> None:
    of_linux("prctl", END_WITH_PARENT, signal.SIGKILL)
    job = json.load(sys.stdin)
    of_linux(
        "unshare", NEW_USER | NEW_NETWORK
    )  # where it is refused, the audit hook alone keeps programs from the network
    if (
        run("answer = 42", ["assert answer == 42"], job["limits"])[0] != "passed"
    ):  # or every program would count as failed
        sys.exit("a harmless program does not run behind these limits")
    found = [run(program["source"], program["tests"], job["limits"]) for program in job["programs"]]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
