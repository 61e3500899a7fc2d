"""Result files: what each kind holds and what its columns mean, from words.yaml and the files of
`mini` themselves.
"""

import csv
from pathlib import Path

from reference.markdown import escaped, table
from reference.params import words


def text(root: Path) -> str:
    """Kinds of files, then all columns."""
    known = words(root)
    kinds = kinds_of(root / "results" / "mini")
    meant = {
        kind: known["files"].get(kind) or known["files"].get(ending_of(kind), "") for kind in kinds
    }
    rows = [
        [f"`{kind}`", escaped(meant[kind]), ", ".join(f"`{c}`" for c in kinds[kind])]
        for kind in sorted(kinds)
    ]
    files = table(["File", "What it holds", "Columns"], rows)
    columns = sorted({column for found in kinds.values() for column in found})
    meanings = table(
        ["Column", "Meaning"],
        [[f"`{column}`", escaped(known["columns"].get(column, ""))] for column in columns],
    )
    return f"## Files\n\n{files}## Columns\n\n{meanings}"


def kinds_of(folder: Path) -> dict[str, list[str]]:
    """Every file that is there, by its folder and name, or of the suite by its name, with the
    columns of those that have any.
    """
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.*")):
        kind = "/".join(dict.fromkeys([*path.relative_to(folder).parts[:1], path.name]))
        if path.suffix == ".csv" and kind not in found:
            with path.open(encoding="utf-8", newline="") as file:
                found[kind] = next(csv.reader(file), [])
        found.setdefault(kind, [])
    return found


def ending_of(kind: str) -> str:
    """How words.yaml names files that mean the same in every folder."""
    name = kind.rpartition("/")[2]
    return name if name == "run.json" else f"*.{name.partition('.')[2]}"
