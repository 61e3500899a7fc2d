"""The command `featcal`: a table of commands, and the one place that turns errors into a message
and an exit code.

A command's module is imported when it runs: `featcal --help` loads neither torch nor transformers.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from copy import copy
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from featcal.errors import FeatCalError, RemoteRankError

MISTAKE, INTERRUPTED, CLOSED = 2, 130, 141
COMMANDS = {  # by name one line of help; the function is `featcal.cli.<name>.<name>`
    "merge": "Merge fine-tuned models into one.",
    "fix": "Calibrate a merged model and test it on held-out samples.",
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

QUIET = "Print results and errors only, no progress."
LOG_FILE = "Write a timestamped log to FILE."
LOG_LEVEL = "Level of the log: debug, info, warning or error. Default: info."
EXIT_CODES = (
    "Exit codes: 0 done; 2 a mistake in arguments, files or settings, explained in one message; "
    "130 interrupted (Ctrl-C, SIGTERM); 141 output closed early, as by | head; 1 a bug in featcal."
)
EPILOG = f"""Examples:

featcal merge task_arithmetic --base base --expert mnist=models/mnist --expert dtd=models/dtd --out merged

featcal fix merged --data mnist=images/mnist --data dtd=images/dtd

{EXIT_CODES}"""


class Command(TyperCommand):
    """A command that names all missing options in one message."""

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:  # noqa: D102
        values, _, _ = self.make_parser(context).parse_args(list(arguments))
        missing = [
            parameter.opts[0] if parameter.param_type_name == "option" else parameter.name.upper()
            for parameter in self.params
            if parameter.required and not values.get(parameter.name)
        ]
        if missing and not values.get("help"):
            from featcal.cli.inputs import records_models

            merged = Path(values.get("merged") or ".")
            if values.get("merged") and merged.is_dir() and not records_models(merged):
                missing += [f"--{name}" for name in ("base", "expert") if not values.get(name)]
            problem = f"{context.info_name} needs {', '.join(missing)}."
            raise FeatCalError(problem, "", f"{context.command_path} --help lists all options")
        return super().parse_args(context, arguments)

    def invoke(self, context: Any) -> Any:
        """Run the command; --tokens 64 is --set tokens=64, and ~ the home folder in any path."""
        values = context.params
        values |= {k: Path(os.path.expanduser(v)) for k, v in values.items() if isinstance(v, Path)}
        for key in [option.name for option in self.params if getattr(option, "hidden", False)]:
            pairs = [f"{key}={value}" for value in values.pop(key) or ()]
            values["setting"] = [*(values["setting"] or ()), *pairs]
        return super().invoke(context)


@cache
def commands() -> dict[str, EntryPoint]:
    """Return our commands, then those of other packages, by name."""
    foreign = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    builtin = [EntryPoint(name, f"featcal.cli.{name}:{name}", GROUP) for name in COMMANDS]
    return {point.name: point for point in (*builtin, *foreign)}


@cache
def load_command(name: str) -> Any:
    """Import a command's module and return the command."""
    function = commands()[name].load()
    module = sys.modules[function.__module__]
    epilog = f"{getattr(module, 'EPILOG', '').strip()}\n\n{EXIT_CODES}"
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, cls=Command, epilog=epilog, context_settings=HELP)(function)
    command: Any = typer.main.get_command(single)
    for option in command.params:
        if option.param_type_name == "option":
            kind = option.type_descriptor.annotation
            choices = "|".join(map(str, get_args(kind)))
            option.metavar = option.metavar or METAVARS.get(kind) or choices or None
            if option.default and not option.is_flag:
                option.help = f"{option.help} Default: {option.default}."
                option.show_default = False
    by_name = {option.name: option for option in command.params}
    for settings in getattr(module, "SETTINGS", ()):
        for key in type(settings).model_fields.keys() - by_name.keys():
            hidden = copy(by_name["setting"])
            hidden.name, hidden.opts, hidden.hidden = key, [f"--{key.replace('_', '-')}"], True
            command.params.append(hidden)
    return command


class LazyCommands(TyperGroup):
    """Commands that are listed by name and one line of help, and loaded when they run."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        for name, point in commands().items():
            foreign = f"Added by the package {getattr(point.dist, 'name', '')}."
            self.commands[name] = TyperCommand(name, help=COMMANDS.get(name, foreign))

    def resolve_command(self, context: Any, arguments: list[str]) -> Any:  # noqa: D102
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
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help=QUIET)] = False,
    log_file: Annotated[str, typer.Option(metavar="FILE", help=LOG_FILE)] = "",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(metavar="LEVEL", show_default=False, help=LOG_LEVEL),
    ] = "info",
) -> None:
    """Apply the options of all commands."""
    from featcal import __version__
    from featcal.cli import output

    output.show_progress(not quiet)
    if log_file:
        output.log_to(os.path.expanduser(log_file), log_level)
    if version:
        output.say(f"featcal {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        output.say(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    message: str | None = None
    group: Any = nullcontext
    try:
        if os.environ.get("WORLD_SIZE", "1") != "1":  # by torchrun; one process imports no torch
            from featcal.calibration.ranks import process_group as group
        with group():
            command = typer.main.get_command(app)
            code = command.main(arguments, prog_name="featcal", standalone_mode=False)
    except RemoteRankError:  # the other process reports its own error
        return MISTAKE
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        code, message = MISTAKE, mistake(error, arguments)
        if message is None:
            raise
    if code == INTERRUPTED:  # by Ctrl-C here or inside typer
        message = "interrupted; no half-written files are left"
    if message:
        from featcal.cli.output import complain

        complain(message)
    return code if isinstance(code, int) else 0


def mistake(error: Exception, arguments: Sequence[str]) -> str | None:
    """Return the message for a mistake or a limit of the machine; None for a bug of ours."""
    reason = str(error).strip()
    if isinstance(error, FeatCalError):
        return reason
    if isinstance(error, typer.TyperException):  # unknown options, missing arguments
        context = getattr(error, "ctx", None)
        way_out = f"{context.command_path if context else 'featcal'} --help lists all options"
        if getattr(error, "option_name", None) in ("--log-file", "--log-level", "--quiet", "-q"):
            way_out = "put it before the command: featcal --quiet --log-file run.log COMMAND"
        text = error.format_message().replace("Value error, ", "")  # of typer's choices
        return f"{text}\n  - {way_out}"
    of_torch = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in reason
    if isinstance(error, MemoryError) or of_torch:
        reason = reason.split(" Of the allocated memory")[0].rstrip(".") or "no more memory"
        problem = f"not enough memory ({reason}); no half-written files are left"
        smaller = "use smaller batches (--set batch=8; for a stage, `batch` in the experiment), or"
        others = "end other processes on that GPU (nvidia-smi lists them), or"
        ways_out = smaller, others, "compute on the CPU: --device cpu"
        return str(FeatCalError(" ".join(["featcal", *arguments][:4]), problem, *ways_out))
    if isinstance(error, OSError) or "(os error" in reason:  # the second by safetensors
        reason = (getattr(error, "strerror", "") or "").lower() or reason or "cannot be used"
        location = getattr(error, "filename", None) or "input or output"
        return f"{location}: {reason}.\n  - check the path, its permissions and the free space"
    return None
