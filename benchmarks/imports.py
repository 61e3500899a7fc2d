"""Start-up: how long the imports of each stage take, and their share of the stage.

python -m benchmarks.imports                 Writes reproduction/report/imports.json, which a page
of the book shows.

A stage's own seconds are those on record in results/mini; they begin after the imports. Imports
are measured in processor time, which neighbours lengthen less than they lengthen the clock.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.calibrate import ROOT
from benchmarks.measure import arguments, machine
from featcal.files import write_json
from reproduction.engine.workers import IMPORTS
from reproduction.experiments import studies
from reproduction.stages.command import STAGES

COMMANDS = "featcal.cli.main"
PAGES = ("reproduction.stages.page", "papermill")
LIGHT = ("pretrain", "gather", "summary")  # stages that import next to nothing

MEASURED = """
import sys, time
from importlib import import_module
start = time.process_time()
for name in sys.argv[1:]:
    import_module(name)
print(time.process_time() - start)
"""


def imported(verb: str) -> tuple[str, ...]:
    """What the process of a stage imports before the stage's own clock starts."""
    return (COMMANDS, *(() if verb in LIGHT else PAGES if verb == "page" else tuple(IMPORTS)))


def seconds(names: tuple[str, ...], repeats: int) -> float:
    """Median processor time of importing modules in a process of its own."""
    command = [sys.executable, "-c", MEASURED, *names]
    runs = [
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        for _ in range(repeats)
    ]
    return statistics.median(float(done.stdout.split()[-1]) for done in runs)


def recorded(folder: Path) -> dict[str, list[float]]:
    """By verb the seconds of every stage on record, each once."""
    spent_by: dict[str, float] = {}
    for path in sorted(folder.glob("*/*/run.json")):
        spent_by |= json.loads(path.read_text()).get("seconds", {})
    by_verb: dict[str, list[float]] = {}
    for stage, spent in spent_by.items():
        by_verb.setdefault(stage.partition("@")[0], []).append(spent)
    return by_verb


def shares(folder: Path, repeats: int) -> dict[str, dict[str, Any]]:
    """By verb: seconds of imports, how many stages are on record and their median seconds, and the
    share of imports in those.
    """
    stages, spent_by, known = recorded(folder), {}, {}
    for verb in (*STAGES, *studies()):
        names = imported(verb)
        known[names] = known.get(names) or seconds(names, repeats)
        spent = round(statistics.median(stages[verb]), 2) if verb in stages else None
        share = None if spent is None else round(known[names] / (known[names] + spent), 3)
        spent_by[verb] = {
            "imports": round(known[names], 2),
            "stages": len(stages.get(verb, [])),
            "median": spent,
            "share": share,
        }
        print(verb, spent_by[verb], flush=True)
    return spent_by


def main() -> None:
    args = arguments(__doc__, repeats=3, suite="mini").parse_args()
    spent_by = shares(ROOT / "results" / args.suite, args.repeats)
    write_json(
        ROOT / "reproduction/report/imports.json",
        {"machine": machine(args.device), "stages": spent_by},
    )


if __name__ == "__main__":
    main()
