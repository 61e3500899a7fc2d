"""Write pipeline/pages.yaml from what the notebooks declare to read: python scripts/page_reads.py.

DVC takes no list of dependencies from a variable, so every page has five places; a place that it
does not need is suite.json.
"""

import ast
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "pipeline" / "pages.yaml"
SLOTS = "abcde"
HEAD = """\
# Which results a page of the report reads: folders and files below results/<suite>/. Written by
# scripts/page_reads.py from the first cell of each notebook; only `requested` is edited by hand.
pages:
"""
REST = "# Results that"  # begins the part below, which stays as it is


def reads_of(source: Path) -> list[str]:
    """Return the results that a page declares to read, as folders or files of a suite's results."""
    for cell in nbformat.read(source, as_version=4).cells:
        if "parameters" in cell.metadata.get("tags", []):
            for line in ast.parse(cell.source).body:
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "reads":
                    return list(ast.literal_eval(line.value))
    return []


def pages_yaml() -> str:
    """Return the text of pipeline/pages.yaml as it has to be."""
    text = HEAD
    for source in sorted((ROOT / "notebooks").glob("*.ipynb")):
        reads = reads_of(source)
        if reads:
            if len(reads) > len(SLOTS):
                raise SystemExit(f"{source.name}: reads {len(reads)} results, at most {len(SLOTS)}")
            filled = reads + ["suite.json"] * (len(SLOTS) - len(reads))
            slots = ", ".join(f"{key}: {read}" for key, read in zip(SLOTS, filled, strict=True))
            text += f"  {source.stem}: {{{slots}}}\n"
    current = TARGET.read_text(encoding="utf-8")
    return text + current[current.index(REST) :]


if __name__ == "__main__":
    TARGET.write_text(pages_yaml(), encoding="utf-8")
