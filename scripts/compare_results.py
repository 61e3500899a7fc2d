"""Compare every CSV file of two results folders: scores by model, other files by column.

python scripts/compare_results.py COMMITTED RECOMPUTED

Scores may differ by 1 point in an average and by 3 in a single task, and by √(500/n) times as much
for tests of n < 500 answers: another CPU sums in another order and trains slightly other experts.
Other numbers may differ by a tenth of their column's size. Prints every file that is not the same
bytes; exit code 1 when a difference is too large or a file or row is missing.
"""

import csv
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path

AVERAGE, TASK = 1.0, 3.0  # points, for ANSWERS answers of a task
ANSWERS = 500
COLUMN = 0.1  # of the mean absolute value of a column that holds no scores
# Columns of scores that say nothing about which model a row is of.
MEASURED = {*"value count correct chosen union validation divergence drift mean_drift".split()}
Rows = list[dict[str, str]]


def read(path: Path) -> Rows:
    """Return the rows of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def number(text: str) -> float | None:
    """Return a cell with a decimal point as a number; other cells name what a row is about."""
    try:
        return float(text) if "." in text else None
    except ValueError:
        return None


def of_scores(committed: Rows, recomputed: Rows) -> tuple[list[str], list[str]]:
    """Compare two files of scores by model. Returns: lines to print, and problems."""
    names = [name for name in committed[0] if name not in {*MEASURED, "task"}]

    def table(rows: Rows) -> Mapping[str, dict[str, tuple[float, int]]]:
        by_model: dict[str, dict[str, tuple[float, int]]] = defaultdict(dict)
        for row in rows:
            model = " ".join(row[name] for name in names if row[name])
            by_model[model][row["task"]] = (float(row["value"]), int(row["count"]))
        return by_model

    lines, problems, old_table, new_table = [], [], table(committed), table(recomputed)
    for model in sorted({*old_table, *new_table}):
        old, new = old_table.get(model, {}), new_table.get(model, {})
        problems += [f"only on one side: {model} {task}" for task in sorted({*old} ^ {*new})]
        moved = {task: new[task][0] - old[task][0] for task in old if task in new}
        if not any(moved.values()):
            continue
        noise = {task: sqrt(max(1.0, ANSWERS / max(old[task][1], 1))) for task in moved}
        worst = max(moved, key=lambda task: abs(moved[task]) / noise[task])
        average, usual = sum(moved.values()) / len(moved), sum(noise.values()) / len(moved)
        line = f"{model}: average {average:+.2f}, {worst} {moved[worst]:+.2f}"
        too_large = abs(average) > AVERAGE * usual or abs(moved[worst]) > TASK * noise[worst]
        (problems if too_large else lines).append(line)
    return lines, problems


def of_columns(committed: Rows, recomputed: Rows) -> tuple[list[str], list[str]]:
    """Compare two files of other numbers by column. Returns: lines to print, and problems."""
    if len(committed) != len(recomputed):
        return [], [f"{len(recomputed)} rows instead of {len(committed)}"]
    lines, problems = [], []
    for column in committed[0].keys() - {"correct", "chosen"}:
        cells = [(old[column], new[column]) for old, new in zip(committed, recomputed, strict=True)]
        pairs = [(number(old), number(new)) for old, new in cells]
        number_pairs = [(old, new) for old, new in pairs if old is not None and new is not None]
        changed = sum(
            None in pair and old != new for pair, (old, new) in zip(pairs, cells, strict=True)
        )
        if changed:
            problems.append(f"{column}: {changed} rows are about something else")
        size = sum(abs(old) for old, _ in number_pairs)
        moved = abs(sum(abs(new) for _, new in number_pairs) - size)
        if moved:
            line = f"{column}: {100 * moved / max(size, moved):.1f} % of its mean size"
            (problems if moved > COLUMN * size else lines).append(line)
    return lines, problems


def compare(committed: Path, recomputed: Path) -> int:
    """Print every CSV file that differs. Returns: the number of problems."""
    names = {
        str(p.relative_to(root)) for root in (committed, recomputed) for p in root.rglob("*.csv")
    }
    same = problems = 0
    for name in sorted(names):
        old, new = committed / name, recomputed / name
        if not (old.is_file() and new.is_file()):
            lines, wrong = [], ["only on one side"]
        elif old.read_bytes() == new.read_bytes():
            same += 1
            continue
        else:
            rows = read(old), read(new)
            heads = [list(side[0]) if side else [] for side in rows]
            if heads[0] != heads[1]:
                lines, wrong = [], ["other columns, or no rows on one side"]
            elif {"task", "metric", "value", "count"} <= set(heads[0]):
                lines, wrong = of_scores(*rows)
            else:
                lines, wrong = of_columns(*rows)
        problems += len(wrong)
        print(name)
        print(*(f"  {line}" for line in lines), *(f"  TOO DIFFERENT  {w}" for w in wrong), sep="\n")
    allowed = f"{AVERAGE:g} point of an average, {TASK:g} of a task, {COLUMN:.0%} of other columns"
    print(f"{len(names)} CSV files, {same} the same bytes; {problems} differences beyond {allowed}")
    return problems if names else 1


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    return int(compare(*map(Path, arguments)) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
