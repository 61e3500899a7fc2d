"""Notebooks: pages without logic, run on invented results and on none; execution is strict and repeats to the byte."""

import ast
import hashlib
import re
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from synthetic_results import write_project

from featcal.errors import BadPage, MissingPath, UnknownKey
from featcal.report import execute, show
from featcal.report.execute import execute_page
from featcal.report.figures import PANELS

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [source.stem for source in SOURCES]
LOGIC = (ast.FunctionDef, ast.ClassDef, ast.For, ast.While, ast.If, ast.IfExp, ast.Lambda, ast.Try, ast.comprehension)


def code_cells(name):
    page = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    return page, [cell for cell in page.cells if cell.cell_type == "code"]


def run_in_memory(name, folder):
    page, _ = code_cells(name)
    NotebookClient(page, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    return page


def test_all_pages_are_there():
    assert NAMES == ["figure1", "figure4", "figure5", "gain", "landing", "rankings", "table01", "table06", "tasks"]


@pytest.mark.parametrize("name", NAMES)
def test_a_source_holds_no_output_and_at_most_eight_code_cells(name):
    page, cells = code_cells(name)
    nbformat.validate(page)
    assert len(cells) <= 8
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
    assert len({cell["id"] for cell in page.cells}) == len(page.cells)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_no_logic_and_imports_the_report_only(name):
    for cell in code_cells(name)[1]:
        tree = ast.parse(cell.source)
        assert not [node for node in ast.walk(tree) if isinstance(node, LOGIC)]
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Import)
            assert not isinstance(node, ast.ImportFrom) or node.module == "featcal.report"


@pytest.mark.parametrize("name", NAMES)
def test_the_parameters_are_tagged_and_name_the_suite(name):
    _, cells = code_cells(name)
    tagged = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    assert [cell.source for cell in tagged] == ['suite = "mini"']


@pytest.mark.parametrize("name", NAMES)
def test_a_page_tags_what_must_not_change_and_ends_with_its_origin(name):
    _, cells = code_cells(name)
    assert any("nbval-check-output" in cell.metadata.get("tags", []) for cell in cells)
    assert "provenance" in cells[-1].source


@pytest.mark.parametrize("name", NAMES)
def test_prose_holds_no_measured_number(name):
    page, _ = code_cells(name)
    prose = "\n".join(cell.source for cell in page.cells if cell.cell_type == "markdown")
    assert not re.findall(r"\d+\.\d+|\d+ ?%", prose)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_runs_on_results_from_the_folder_of_executed_pages(name, tmp_path):
    write_project(tmp_path)
    folder = tmp_path / "book" / "pages"
    folder.mkdir(parents=True)
    page = run_in_memory(name, folder)
    outputs = [output for cell in page.cells if cell.cell_type == "code" for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"execute_result"}
    assert not any("not run" in output.data["text/plain"][:8] for output in outputs)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_runs_without_results_and_says_so(name, tmp_path):
    write_project(tmp_path, empty=True)
    page = run_in_memory(name, tmp_path)
    assert "not run" in str([cell.outputs for cell in page.cells if cell.cell_type == "code"])


@pytest.fixture
def sources(tmp_path):
    """A small page of its own, which needs no results and little time."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    cell = nbformat.v4.new_code_cell
    cells = [
        cell('suite = "mini"', metadata={"tags": ["parameters"]}, id="parameters"),
        cell("import sys; print('a warning', file=sys.stderr); print(suite)", id="first"),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": execute.KERNEL}), folder / "small.ipynb")
    return folder


def test_executing_twice_gives_the_same_bytes(sources, tmp_path):
    pages = [execute_page("small", {"suite": "files"}, sources, tmp_path / f"out{i}") for i in range(2)]
    digests = {hashlib.sha256(page.read_bytes()).hexdigest() for page in pages}
    assert len(digests) == 1
    text = pages[0].read_text()
    assert "files" in text and '"name": "stderr"' not in text and "papermill" not in text and str(tmp_path) not in text


def test_figures_of_a_page_have_the_bytes_of_another_process(tmp_path, monkeypatch):
    write_project(tmp_path)
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    path = execute_page("figure1", {"suite": "mini"}, tmp_path / "notebooks", tmp_path / "out")
    page = nbformat.read(path, as_version=4)
    outputs = [output.data for cell in page.cells if cell.cell_type == "code" for output in cell.outputs]
    monkeypatch.chdir(tmp_path)
    drawn = [show.figure(panel, "figure1", "mini").bundle["image/svg+xml"] for panel in PANELS]
    assert [data["image/svg+xml"] for data in outputs if "image/svg+xml" in data] == drawn
    assert path.stat().st_size < execute.LARGEST


def test_an_unknown_parameter_is_refused_with_the_nearest_name(sources, tmp_path):
    with pytest.raises(UnknownKey, match="did you mean 'suite'"):
        execute_page("small", {"suit": "mini"}, sources, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unknown_page_is_refused_by_name(sources, tmp_path):
    with pytest.raises(MissingPath, match="table99.ipynb"):
        execute_page("table99", {}, sources, tmp_path / "out")


def test_a_page_that_is_too_large_leaves_the_old_one_alone(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(execute, "LARGEST", 100)
    out = tmp_path / "out"
    out.mkdir()
    (out / "small.ipynb").write_text("old")
    with pytest.raises(BadPage, match="small.ipynb"):
        execute_page("small", {}, sources, out)
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("small.ipynb", "old")]


def test_a_failing_cell_writes_nothing(sources, tmp_path):
    from papermill.exceptions import PapermillExecutionError

    page = nbformat.read(sources / "small.ipynb", as_version=4)
    page.cells.append(nbformat.v4.new_code_cell("no_such_name", id="broken"))
    nbformat.write(page, sources / "small.ipynb")
    with pytest.raises(PapermillExecutionError, match="no_such_name"):
        execute_page("small", {}, sources, tmp_path / "out")
    assert not (tmp_path / "out").exists()
