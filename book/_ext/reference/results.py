"""Result files and their columns, from words.yaml and the files of `mini`."""

import csv
from pathlib import Path

from reference.markdown import escaped, table
from reference.params import meanings


def text(root: Path) -> str:
    """Return the kinds of files, then all columns, as MyST."""
    known = meanings(root)
    kinds = kinds_of(root / "results" / "mini")
    meant = {
        kind: known["files"].get(kind) or known["files"].get(ending_of(kind), "") for kind in kinds
    }
    rows = [
        [f"`{kind}`", escaped(meant[kind]), ", ".join(f"`{c}`" for c in kinds[kind])]
        for kind in sorted(kinds)
    ]
    files = table(["File", "Content", "Columns"], rows)
    columns = sorted({column for of_kind in kinds.values() for column in of_kind})
    meanings_table = table(
        ["Column", "Meaning"],
        [[f"`{column}`", escaped(known["columns"].get(column, ""))] for column in columns],
    )
    return f"## Files\n\n{files}## Columns\n\n{meanings_table}"


def kinds_of(folder: Path) -> dict[str, list[str]]:
    """Return the columns of every file, by study and name, or by name for files of the suite."""
    columns_by_kind: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.*")):
        kind = "/".join(dict.fromkeys([*path.relative_to(folder).parts[:1], path.name]))
        if path.suffix == ".csv" and kind not in columns_by_kind:
            with path.open(encoding="utf-8", newline="") as file:
                columns_by_kind[kind] = next(csv.reader(file), [])
        columns_by_kind.setdefault(kind, [])
    return columns_by_kind


def ending_of(kind: str) -> str:
    """Return the name in words.yaml of files that mean the same in every folder."""
    name = kind.rpartition("/")[2]
    return name if name == "run.json" else f"*.{name.partition('.')[2]}"
