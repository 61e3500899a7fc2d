"""Compares the scores of two results folders: averages within 1 point, single tasks within 3.

Of fewer than 500 answers the noise of a score is larger, and so is what is let pass, in proportion.

python scripts/compare_results.py COMMITTED RECOMPUTED   prints the differences per model; exit code
1 when one is too large.
"""

import sys
from collections import defaultdict
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from featcal.errors import FeatCalError
from reproduction.results import SCORES, read_rows

AVERAGE, TASK = (
    1.0,
    3.0,
)  # points; another CPU sums in another order and trains slightly other experts
MODEL = ("suite", "role", "pool", "upstream", "method", "setting", "metric", "seed")
ANSWERS = 500  # of a task, on which those are meant; of n fewer √(500/n) times as much
Scores = dict[
    tuple[str, ...], dict[str, tuple[float, int]]
]  # by model and task: value and number of answers


@dataclass(frozen=True)
class Difference:
    """One model's scores against the committed ones: of the average, and of the task that moved
    most for its size.
    """

    model: str
    average: float
    task: str
    worst: float
    too_large: bool


def scores(folder: Path) -> Scores:
    """Per model the value of each task and its number of answers, from
    scores/<role>-<pool>/scores.csv of every suite.
    """
    table: Scores = defaultdict(dict)
    for path in sorted(folder.glob("*/scores/*/scores.csv")):
        for row in read_rows(path, SCORES):
            table[tuple(str(row[column]) for column in MODEL)][row["task"]] = (
                row["value"],
                int(row["count"]),
            )
    return dict(table)


def differences(committed: Scores, recomputed: Scores) -> tuple[list[Difference], list[str]]:
    """Per model what moved, and the models and tasks that only one side has."""
    differences, unmatched = [], []
    for model in sorted(set(committed) | set(recomputed)):
        here, there = committed.get(model, {}), recomputed.get(model, {})
        name = " ".join(word for word in model if word)
        unmatched += [f"{name} {task}" for task in sorted(set(here) ^ set(there))]
        moved = {task: there[task][0] - here[task][0] for task in here if task in there}
        if moved:
            noise = {task: sqrt(max(1.0, ANSWERS / here[task][1])) for task in moved}
            worst = max(moved, key=lambda task: abs(moved[task]) / noise[task])
            average, usual = sum(moved.values()) / len(moved), sum(noise.values()) / len(moved)
            too_large = abs(average) > AVERAGE * usual or abs(moved[worst]) > TASK * noise[worst]
            differences.append(Difference(name, average, worst, moved[worst], too_large))
    return differences, unmatched


def report(differences: list[Difference], unmatched: list[str]) -> bool:
    """Prints the table; true when every difference is small and both sides have the same rows."""
    width = max((len(d.model) for d in differences), default=5)
    print(f"{'model':{width}}  average  largest on one task")
    for d in differences:
        mark = "  too large" if d.too_large else ""
        print(f"{d.model:{width}}  {d.average:+7.2f}  {d.worst:+7.2f} {d.task}{mark}")
    for name in unmatched:
        print(f"only on one side: {name}")
    bad = sum(d.too_large for d in differences) + len(unmatched)
    of = f"{AVERAGE:g} point of the average or {TASK:g} of a task, for {ANSWERS} answers"
    print(f"{len(differences)} models compared, {bad} outside {of}")
    return not bad and bool(differences)


def main(arguments: list[Any]) -> int:
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        committed, recomputed = (scores(Path(folder)) for folder in arguments)
    except FeatCalError as error:
        print(f"compare_results: {error}", file=sys.stderr)
        return 2
    return 0 if report(*differences(committed, recomputed)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
