"""Where the project is, seen from a notebook.

papermill starts a page in one folder, nbval in another; both lie inside the project, so climbing
finds it.
"""

from pathlib import Path

from featcal.settings import project_root

__all__ = ["project_root", "results_folder"]


def results_folder(suite: str) -> Path:
    """The folder of one suite's result files; it may not exist yet."""
    return project_root() / "results" / suite
