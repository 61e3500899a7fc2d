"""Stages `page` and `summary`, made from results alone; the same results give the same bytes."""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from featcal.errors import BadFile, MissingPath, UnknownKey
from featcal.files import atomic_path, write_json
from reproduction.results import chosen_suite, project_root, read_yaml, write_rows

LARGEST = 450_000  # bytes; executed pages are kept in git
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def run(key: str) -> None:
    """Write book/pages/<key>.ipynb; the suite is given to a page that declares it."""
    import papermill

    root, parameters = project_root(), dict[str, str]()
    source = root / "notebooks" / f"{key}.ipynb"
    if not source.is_file():
        way_out = "pages are named after the notebooks in notebooks/"
        raise MissingPath(source, "the source of a page", way_out)
    if "suite" in papermill.inspect_notebook(source):
        parameters["suite"] = chosen_suite(read_yaml(root / "params.yaml"))
    execute_page(key, parameters, source.parent, root / "book" / "pages")


def execute_page(
    name: str, parameters: Mapping[str, Any], source_folder: Path, out_folder: Path
) -> Path:
    """Run `source_folder/name.ipynb` there with these parameters; return the page in `out_folder`.

    Raises: BadFile above LARGEST bytes; papermill's own error when a cell fails; nothing is written.
    """
    import papermill

    source = source_folder / f"{name}.ipynb"
    with tempfile.TemporaryDirectory() as scratch:
        ran = Path(scratch) / source.name
        options: dict[str, Any] = {"parameters": dict(parameters), "cwd": str(source.parent)}
        # every cell has ended; to be asked politely takes half a second
        options |= {"kernel_name": KERNEL["name"], "shutdown_kernel": "immediate"}
        options |= {"extra_arguments": ["--log-level=CRITICAL"], "progress_bar": False}
        papermill.execute_notebook(source, ran, **options)
        page = stable(nbformat.read(ran, as_version=4))
    target, content = out_folder / source.name, nbformat.writes(page).rstrip("\n").encode()
    if len(content) >= LARGEST:
        problem = f"{len(content)} bytes, more than the {LARGEST} a page may have"
        raise BadFile(target, problem, "show less on it: a smaller picture, or a shorter table")
    with atomic_path(target) as hidden:
        hidden.write_bytes(content + b"\n")
    return target


def stable(page: NotebookNode) -> NotebookNode:
    """Return the page without times, durations, random ids and warnings with paths."""
    page.metadata = NotebookNode(kernelspec=dict(KERNEL), language_info={"name": "python"})
    for number, cell in enumerate(page.cells):
        cell.metadata.pop("papermill", None)
        cell.metadata.pop("execution", None)
        if "injected-parameters" in cell.metadata.get("tags", []):
            cell["id"] = "injected-parameters"
            cell.metadata["tags"] = ["injected-parameters", "remove-cell"]
        cell.setdefault("id", f"cell-{number}")
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _is_warning(output)]
    return page


def _is_warning(output: NotebookNode) -> bool:
    """Return True for text on stderr, which is shown to the user but not kept."""
    warned = output.output_type == "stream" and output.name == "stderr"
    if warned:
        sys.stderr.write(output.text)
    return warned


def summary(key: str) -> None:
    """Write results/<suite>/headline.*, claims.json or, for `artifact`, ARTIFACT.md."""
    from reproduction.report import artifact  # pandas, which other stages need not import

    root = project_root()
    suite = chosen_suite(read_yaml(root / "params.yaml"))
    folder = root / "results" / suite
    if key == "claims":
        write_json(folder / "claims.json", artifact.claims_as_data(suite))
    elif key == "artifact":
        with atomic_path(root / "ARTIFACT.md") as hidden:
            hidden.write_text(artifact.text(suite), encoding="utf-8", newline="\n")
    elif key == "headline":
        evidence = artifact.Evidence(suite, artifact.ROLE, artifact.POOL)
        write_json(folder / "headline.json", artifact.metrics(evidence))
        write_rows(folder / "headline.tasks.csv", artifact.by_task(evidence), artifact.TASKS)
        write_rows(folder / "headline.drift.csv", artifact.by_block(evidence), artifact.BLOCKS)
    else:
        raise UnknownKey("summary", key, ["headline", "claims", "artifact"])
