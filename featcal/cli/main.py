"""The command `featcal`: a table of commands, and the one place that turns errors into a message
and an exit code.

A command's module is imported when the command runs, so `featcal --help` loads neither torch nor
transformers.
"""

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from featcal.cli import terminal
from featcal.errors import FeatCalError, RemoteRankError

MISTAKE, INTERRUPTED = 2, 130
# by name one line of help; the function is `featcal.cli.<name>.<name>`
COMMANDS = {
    "merge": "Merge fine-tuned models into one.",
    "fix": "Calibrate a merged model and check on held-out samples that it is better.",
    "calibrate": "Calibrate a merged model to its experts' features.",
    "compare": "Measure how closely models match their experts, without labels.",
    "evaluate": "Measure accuracy on labelled images or texts.",
    "inspect": "Show a model folder and what calibration solves.",
    "plan": "Estimate the memory, disk and operations of a calibration.",
    "convert": "Convert a CLIP model between transformers and open_clip.",
}
HELP = {"help_option_names": ["-h", "--help"]}
METAVARS = {Path: "PATH", int: "N", float: "X", str: "NAME"}
GROUP = "featcal.commands"  # entry points of other packages: functions for typer
PATH_ERRORS = (PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)
OTHER_PATH_ERRORS = {  # of mounted buckets and file servers, and of paths
    getattr(errno, name)
    for name in (
        "EBUSY", "EIO", "ENAMETOOLONG", "ENODEV", "ENOLCK", "ENOSYS", "ENOTCONN", "EROFS", "ESTALE",
        "EXDEV",
    )
}  # fmt: skip

EXIT_CODES = (
    "Exit codes: 0 done; 2 a mistake in arguments, files or settings, explained in one message; "
    "130 interrupted (Ctrl-C, SIGTERM); 1 a bug in featcal."
)
EPILOG = f"""Examples:

featcal merge task_arithmetic --base base --expert mnist=models/mnist --expert dtd=models/dtd --out merged

featcal fix merged --data mnist=images/mnist --data dtd=images/dtd

featcal calibrate --help

{EXIT_CODES}"""


class Command(TyperCommand):
    """A command that names all missing options in one message."""

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        """Raise FeatCalError if required options are missing."""
        given, _, _ = self.make_parser(context).parse_args(list(arguments))
        missing = [one for one in self.params if one.required and not given.get(one.name)]
        if missing and not given.get("help"):
            options = [
                one.opts[0] if one.opts[0][0] == "-" else one.name.upper() for one in missing
            ]
            from featcal.cli.inputs import records_models

            merged = given.get("merged")
            if any(one.name == "merged" for one in self.params) and not (
                merged and records_models(Path(merged))
            ):
                options += [f"--{name}" for name in ("base", "expert") if not given.get(name)]
            way_out = f"{context.command_path} --help lists all options"
            raise FeatCalError(context.command_path, f"also needs {', '.join(options)}", way_out)
        return super().parse_args(context, arguments)


@cache
def foreign_commands() -> dict[str, EntryPoint]:
    """Return the commands of other packages by name."""
    return {point.name: point for point in sorted(entry_points(group=GROUP), key=lambda p: p.name)}


@cache
def load_command(name: str) -> Any:
    """Import a command's module and return the command."""
    point = foreign_commands().get(name)
    function = point.load() if point else getattr(import_module(f"featcal.cli.{name}"), name)
    module = sys.modules[function.__module__]
    epilog = f"{getattr(module, 'EPILOG', '').strip()}\n\n{EXIT_CODES}"
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, cls=Command, epilog=epilog, context_settings=HELP)(function)
    command: Any = typer.main.get_command(single)
    for option in command.params:
        if option.param_type_name == "argument":
            continue
        option.metavar = option.metavar or METAVARS.get(option.type_descriptor.annotation)
        if option.default and not option.is_flag:
            option.help, option.show_default = f"{option.help} Default: {option.default}.", False
    return command


def all_commands() -> dict[str, Any]:
    """Return every command by name, loaded."""
    return {name: load_command(name) for name in (*COMMANDS, *foreign_commands())}


class LazyCommands(TyperGroup):
    """Commands that are listed by name and one line of help, and loaded when they run."""

    def __init__(self, **how: Any):
        super().__init__(**how)
        lines = COMMANDS | {
            name: f"Command of the package {point.dist.name if point.dist else point.value}."
            for name, point in foreign_commands().items()
        }
        self.commands = {name: TyperCommand(name, help=line) for name, line in lines.items()}

    def resolve_command(self, context: Any, arguments: list[str]) -> Any:
        """Return name, loaded command and remaining arguments."""
        name, command, rest = super().resolve_command(context, arguments)
        return name, load_command(name) if name and command else command, rest


app = typer.Typer(
    cls=LazyCommands,
    rich_markup_mode=None,  # plain help: rich takes half of the time of `featcal --help`
    help="FeatCal: calibrate a merged model to its experts' features, in closed form.",
    epilog=EPILOG,
    context_settings=HELP,
)


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print results and errors only, no progress.")
    ] = False,
    log_file: Annotated[
        str, typer.Option(metavar="FILE", help="Write a timestamped log to FILE.")
    ] = "",
    log_level: Annotated[
        str, typer.Option(metavar="LEVEL", help="Level of the log: debug, info, warning or error.")
    ] = "info",
) -> None:
    """Apply the options of all commands."""
    from featcal import __version__

    terminal.show_progress(not quiet)
    if log_file:
        terminal.log_to(log_file, log_level)
    if version:
        terminal.say(f"featcal {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        terminal.say(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    several = os.environ.get("WORLD_SIZE", "1") != "1"  # torchrun; one process imports no torch
    ranks = "featcal.calibration.ranks"
    try:
        with (
            sigterm_as_ctrl_c(),
            import_module(ranks).process_group() if several else nullcontext(),
        ):
            command = typer.main.get_command(app)
            code = command.main(arguments, prog_name="featcal", standalone_mode=False)
    except RemoteRankError:  # the other process reports its own error
        return MISTAKE
    except FeatCalError as error:
        terminal.complain(str(error))
        return MISTAKE
    except typer.TyperException as error:  # unknown options, missing arguments
        context = getattr(error, "ctx", None)
        way_out = f"{context.command_path if context else 'featcal'} --help lists all options"
        if getattr(error, "option_name", None) in ("--log-file", "--log-level", "--quiet", "-q"):
            way_out = "put it before the command: featcal --quiet --log-file run.log COMMAND"
        terminal.complain(f"{error.format_message()}\n  - {way_out}")
        return MISTAKE
    except (MemoryError, RuntimeError) as error:
        kind, reason = type(error).__name__, str(error).strip().split(" Of the allocated memory")[0]
        if (
            kind not in ("MemoryError", "OutOfMemoryError")
            and "can't allocate memory" not in reason
        ):
            raise
        problem = f"not enough memory ({reason.rstrip('.') or 'no more memory'})"
        ways_out = (
            "use smaller batches (--set batch=8; for a stage, `batch` in the experiment), or",
            "end other processes on that GPU (nvidia-smi lists them), or",
            "compute on the CPU: --device cpu",
        )
        problem += "; no half-written files are left"
        location = " ".join(["featcal", *arguments][:4])
        terminal.complain(str(FeatCalError(location, problem, *ways_out)))
        return MISTAKE
    except OSError as error:
        if not isinstance(error, PATH_ERRORS) and error.errno not in OTHER_PATH_ERRORS:
            raise
        reason = (error.strerror or "cannot be used").lower()
        terminal.complain(f"{error.filename}: {reason}.\n  - check the path and its permissions")
        return MISTAKE
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:  # by Ctrl-C here or inside typer
        terminal.complain("interrupted; no half-written files are left")
    return code if isinstance(code, int) else 0


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Let SIGTERM (a time limit, a scheduler) do what Ctrl-C does, unless it is already handled."""
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if ours:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
