"""The merging methods with their settings, from the registry."""

from pathlib import Path

from featcal.merging.registry import methods_table
from reference.markdown import escaped, table


def text(root: Path) -> str:
    """Return the table of methods as MyST."""
    rows = [
        [f"`{name}`", f"`{settings}`" if settings else "none", escaped(source)]
        for name, settings, source in methods_table()
    ]
    return table(["Method", "Settings with defaults", "Source"], rows)
