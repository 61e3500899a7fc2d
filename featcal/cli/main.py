"""The command `featcal`: a table of commands, and one place that turns what went wrong into a
message and an exit code.

0: done. 2: a mistake in arguments, files or settings, told in one message. 130: Ctrl-C, SIGTERM.
Anything else is a fault of this package and leaves its traceback, with exit code 1.
"""

import errno
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Annotated

import typer
from typer.main import get_command

from featcal.calibration.ranks import started
from featcal.cli import calibrate, compare, convert, evaluate, inspect, merge, plan, tune
from featcal.cli.terminal import complain, hush, log_to, plain_without_terminal, say
from featcal.errors import FeatCalError, OutOfMemory, RemoteRankError

MISTAKE, INTERRUPTED = 2, 130
COMMANDS = "featcal.commands"  # entry points of other packages: functions for typer
# a path that cannot be written: who may, what lies there, how it is mounted, how long its name is
PATH_TROUBLE = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
)

EXIT_CODES = """Exit codes: 0 done; 2 a mistake in arguments, files or settings, told in one message; 130 interrupted (Ctrl-C,
SIGTERM); 1 a fault of featcal itself."""
EPILOG = f"""Examples:

featcal merge task_arithmetic --base base --expert mnist=models/mnist --expert dtd=models/dtd --out merged

featcal calibrate --base base --merged merged --expert mnist=models/mnist --data mnist=images/mnist --out new

featcal calibrate --help

{EXIT_CODES}"""
FOREIGN = {point.name for point in entry_points(group=COMMANDS)}
app = typer.Typer(
    help="FeatCal: calibrate a merged model to its experts' features, in closed form.",
    epilog=EPILOG,
)
for command in (
    merge.merge,
    calibrate.calibrate,
    compare.compare,
    evaluate.evaluate,
    inspect.inspect,
    plan.plan,
    convert.convert,
    tune.tune,
    *(point.load() for point in sorted(entry_points(group=COMMANDS), key=lambda point: point.name)),
):
    own = getattr(sys.modules[command.__module__], "EPILOG", "")
    kind = merge.MergeCommand if command is merge.merge else None
    app.command(cls=kind, epilog=own if "Exit codes" in own else f"{own.strip()}\n\n{EXIT_CODES}")(
        command
    )


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
    log_file: Annotated[
        str, typer.Option(metavar="FILE", help="Append what is told of the run, with times.")
    ] = "",
    log_level: Annotated[
        str, typer.Option(metavar="LEVEL", help="Of --log-file: debug, info, warning or error.")
    ] = "info",
) -> None:
    from featcal import __version__

    if log_file:
        log_to(log_file, log_level)

    if version:
        say(f"featcal {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        say(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit code."""
    plain_without_terminal()
    hush(False)  # what an earlier command of this process was told
    try:
        with ended_as_by_ctrl_c(), started():
            code = get_command(app).main(arguments, prog_name="featcal", standalone_mode=False)
    except RemoteRankError:  # by another process of this run, which tells it
        return MISTAKE
    except FeatCalError as error:
        own = FOREIGN.isdisjoint(sys.argv[1:] if arguments is None else arguments)
        complain(in_options(str(error)) if own else str(error))
        return MISTAKE
    except (
        typer.TyperException
    ) as error:  # what typer cannot make sense of: unknown options, missing arguments
        context = getattr(error, "ctx", None)
        way_out = f"{context.command_path if context else 'featcal'} --help tells what there is"
        if getattr(error, "option_name", None) in ("--log-file", "--log-level"):
            way_out = (
                "it stands before the command: featcal --log-file run.log --log-level info COMMAND"
            )
        complain(f"{error.format_message()}\n  - {way_out}")
        return MISTAKE
    except (MemoryError, RuntimeError) as error:
        if not no_memory(error):
            raise
        complain(
            str(
                out_of_memory(
                    ["featcal", *(sys.argv[1:] if arguments is None else arguments)], error
                )
            )
        )
        return MISTAKE
    except OSError as error:
        if error.errno not in PATH_TROUBLE:
            raise
        reason = (error.strerror or "cannot be used").lower()
        complain(f"{error.filename}: {reason}.\n  - check the path and who may write there")
        return MISTAKE
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:
        complain("interrupted; nothing half-written is left")
    return code if isinstance(code, int) else 0


def out_of_memory(command: Sequence[str], reason: BaseException) -> OutOfMemory:
    """The error of a command that asked for more memory than there is, with its first words and the
    allocator's.
    """
    said = str(reason).strip().split(" Of the allocated memory")[0].rstrip(".") or "no more memory"
    return OutOfMemory(
        " ".join(command[:4]),
        f"not enough memory ({said}); nothing of it is left half-written",
        "lower --batch (of a stage, `batch` in the experiment's settings), or",
        "end what else is on that GPU (nvidia-smi lists it), or",
        "compute on the CPU: --device cpu",
    )


OPTIONS = {
    "calibrate.modules": "--module",
    "calibrate.norm": "--norm/--no-norm",
    "calibrate.bias": "--bias/--no-bias",
    "merge.embeddings": "--embeddings",
    "merge.batches": "--data",
    "merge.experts": "--expert",
    "merge.head": "--head",
    "merge.scale": "--scale",
    "merge.method": "METHOD",
}
# what the library calls otherwise than the commands do, and what these say instead
WORDS = {
    r"plan=featcal\.BlockPlan\((?:[^()]|\([^()]*\))*\)": "--stack PATH (calibrate, tune, compare and plan have it)",
    r"batches\['(.+?)'\]": r"--data \1",
    r"^(device|samples|split|tokens|work):": r"--\1:",
    r"^compare\.models:": "--model:",
}
KEY = re.compile(r"(?<![\w.-])(calibrate|merge|tune)\.([a-z]+(?:_[a-z]+)*)(?![\w.])")


def in_options(text: str) -> str:
    """A message of the library in the words of the commands: --ridge for calibrate.ridge, --set
    density for merge.density.

    A key of an experiment, which has more parts, stays as it is, and so do names of files.
    """
    for words, ours in WORDS.items():
        text = re.sub(words, ours, text)

    def option(found: re.Match[str]) -> str:
        room, key = found.groups()
        if key in ("json", "yaml", "yml", "py"):
            return found[0]
        return OPTIONS.get(found[0]) or (
            f"--set {key}" if room == "merge" else f"--{key.replace('_', '-')}"
        )

    return KEY.sub(option, text)


@contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """Inside, SIGTERM (a time limit, a scheduler) does what Ctrl-C does; where it is ignored or
    handled it stays so.
    """
    here = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if here:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if here:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def no_memory(error: BaseException) -> bool:
    """Whether this is torch's or Python's word for memory that is used up; torch is not imported to
    ask.
    """
    of_torch = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or of_torch
