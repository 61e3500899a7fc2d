"""What the program `featcal` runs: whoever can answer a command before anything heavy is imported,
else main.py.

A package registers such a function as an entry point of the group `featcal.ahead`, named like its
command. It is given the arguments and returns an exit code, or None where the command is to be run
as any other. main.py takes longer to import.
"""

import sys
from importlib.metadata import entry_points

AHEAD = "featcal.ahead"


def main() -> int:
    """Run this process's arguments and return the exit code."""
    arguments = sys.argv[1:]
    try:
        for point in entry_points(group=AHEAD, name=arguments[0] if arguments else ""):
            code: int | None = point.load()(arguments)
            if code is not None:
                return code
    except KeyboardInterrupt:  # before the command was begun
        print("featcal: interrupted; nothing half-written is left", file=sys.stderr)
        return 130
    from featcal.cli.process import share_machine

    share_machine()
    from featcal.cli.main import main

    return main()
