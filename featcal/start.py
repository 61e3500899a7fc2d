"""What the program `featcal` runs: a stage that DVC starts goes to a process with its imports behind it, all else to cli.py.

A file of its own, since cli.py takes longer to import than a fork to be had.
"""

import sys

from featcal.stages import resident


def main() -> int:
    """Run this process's arguments and return the exit code."""
    try:
        code = resident.stage(sys.argv[1:])
    except KeyboardInterrupt:  # before the stage was begun
        print("featcal: interrupted; nothing half-written is left", file=sys.stderr)
        return 130
    if code is not None:
        return code
    from featcal.cli import main

    return main()
