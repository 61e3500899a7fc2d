"""Entry point of the program `featcal`, which imports as little as possible.

A package may register a function in the entry point group `featcal.ahead`, named like its command.
It gets the arguments and returns an exit code, or None to run the command as any other.
"""

import sys
from importlib.metadata import entry_points

AHEAD = "featcal.ahead"


def main() -> int:
    """Run this process's arguments and return the exit code."""
    arguments = sys.argv[1:]
    try:
        named = arguments and not arguments[0].startswith("-")
        for point in entry_points(group=AHEAD, name=arguments[0]) if named else ():
            code: int | None = point.load()(arguments)
            if code is not None:
                return code
    except KeyboardInterrupt:  # before the command began
        print("featcal: interrupted; no half-written files are left", file=sys.stderr)
        return 130
    from featcal.cli.process import share_machine

    share_machine()
    from featcal.cli.main import main

    return main()
