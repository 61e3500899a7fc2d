"""The command line, from typer's own table of commands."""

from pathlib import Path
from typing import Any

from featcal.cli.main import EXIT_CODES, commands, load_command
from reference.markdown import block, defined, docstring, escaped


def text(root: Path) -> str:
    """Return all commands as MyST."""
    described = "".join(command(name, load_command(name)) for name in commands())
    return f"{described}## Exit codes\n\n{escaped(EXIT_CODES)}\n"


def command(name: str, one: Any) -> str:
    """Return one command: its help, usage, options and examples."""
    shown = [parameter for parameter in one.params if not getattr(parameter, "hidden", False)]
    called = " ".join(
        _called(parameter) for parameter in shown if parameter.required or _argument(parameter)
    )
    options = defined((_term(parameter), escaped(_meaning(parameter))) for parameter in shown)
    usage = block(folded(f"featcal {name} {called} [OPTIONS]"), "bash")
    return f"## featcal {name}\n\n{docstring(one.help or '')}{usage}\n{options}{epilog(one.epilog or '')}"


def epilog(text: str) -> str:
    """Return the text below the options of `--help`, with command lines as code."""
    parts = []
    for paragraph in filter(None, (part.strip() for part in text.split("\n\n"))):
        if paragraph.startswith("Exit codes:"):
            parts += [f"{escaped(paragraph)}\n\n"] * (paragraph != EXIT_CODES)
        elif paragraph.startswith(("featcal ", "torchrun ", "eval ")):
            parts.append(block(folded(paragraph), "bash") + "\n")
        else:
            parts.append(f"{escaped(paragraph)}\n\n")
    return "".join(parts)


def folded(line: str) -> str:
    """Return a command line broken before options into lines of at most 80 letters."""
    lines = [""]
    for part in line.replace(" --", "\n--").splitlines():
        if lines[-1] and len(lines[-1]) + len(part) > 78:
            lines.append(f"    {part}")
        else:
            lines[-1] += f" {part}" if lines[-1] else part
    return " \\\n".join(lines)


def _argument(parameter: Any) -> bool:
    return not any(option.startswith("-") for option in parameter.opts)


def _called(parameter: Any) -> str:
    """Return a parameter as written in a call."""
    if _argument(parameter):
        return parameter.name.upper() if parameter.required else f"[{parameter.name.upper()}]"
    return f"{parameter.opts[0]} {parameter.metavar}"


def _term(parameter: Any) -> str:
    if _argument(parameter):
        return f"`{parameter.name.upper()}`"
    names = ", ".join(f"`{option}`" for option in [*parameter.opts, *parameter.secondary_opts])
    return names if getattr(parameter, "is_flag", False) else f"{names} `{parameter.metavar}`"


def _meaning(parameter: Any) -> str:
    """Return the help of a parameter, and whether it is required."""
    return (parameter.help or "").strip() + " Required." * bool(parameter.required)
