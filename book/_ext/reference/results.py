"""Result files: what each kind holds and what its columns mean, from words.yaml and the files of `mini` themselves."""

import csv
from pathlib import Path

from reference.markdown import escaped, table
from reference.params import words


def text(root: Path) -> str:
    """Kinds of files, then all columns."""
    known = words(root)
    kinds = kinds_of(root / "results" / "mini")
    rows = [
        [f"`{kind}`", escaped(known["files"].get(kind, "")), ", ".join(f"`{c}`" for c in kinds[kind])] for kind in sorted(kinds)
    ]
    files = table(["File", "What it holds", "Columns"], rows)
    columns = sorted({column for found in kinds.values() for column in found})
    meanings = table(["Column", "Meaning"], [[f"`{column}`", escaped(known["columns"].get(column, ""))] for column in columns])
    return f"## Files\n\n{files}## Columns\n\n{meanings}"


def kinds_of(folder: Path) -> dict[str, list[str]]:
    """Every kind of file that is there, by how its name ends behind role and pool, with the columns of those that have any."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.*")):
        stem, _, ending = path.name.partition(".")
        kind = f".{ending}" if "-" in stem else path.name
        if path.suffix == ".csv" and kind not in found:
            with path.open(encoding="utf-8", newline="") as file:
                found[kind] = next(csv.reader(file), [])
        found.setdefault(kind, [])
    return found
