"""Where the project is, seen from a notebook.

papermill starts a page in one folder, nbval in another; both lie inside the project, so climbing finds it.
"""

from pathlib import Path

from featcal.errors import MissingPath

MARK = "params.yaml"


def project_root(start: Path | None = None) -> Path:
    """The nearest folder at or above `start` (the current folder by default) that holds params.yaml.

    Raises: MissingPath when no folder on the way up holds it.
    """
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / MARK).is_file():
            return folder
    raise MissingPath(here / MARK, "pages are read inside a project", "start from a folder of the cloned repository")


def results_folder(suite: str, start: Path | None = None) -> Path:
    """The folder of one suite's result files; it may not exist yet."""
    return project_root(start) / "results" / suite
