"""Notebooks: pages without logic, run on the results in git and on none; execution is strict and
repeats to the byte.

One page is more than a view of results: the method is worked out on its page.
"""

import ast
import importlib.util
import re
from copy import deepcopy
from pathlib import Path

import nbformat
import pytest
from pages import run_page, with_parameters, without_kernels
from synthetic_results import write_project

from featcal.errors import BadFile, MissingPath
from reproduction.report import evidence
from reproduction.stages import page as execute
from reproduction.stages.page import execute_page

ROOT = Path(__file__).parents[3]
SOURCES = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [source.stem for source in SOURCES]
VIEWS = [name for name in NAMES if name != "method"]
_spec = importlib.util.spec_from_file_location("pages_yaml", ROOT / "scripts" / "page_reads.py")
SCRIPT = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(SCRIPT)
MOST_TABLES = 6  # folds included
LOGIC = (
    ast.FunctionDef, ast.ClassDef, ast.For, ast.While, ast.If, ast.IfExp, ast.Lambda, ast.Try, ast.comprehension,
)  # fmt: skip


def code_cells(name):
    page = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    return page, [cell for cell in page.cells if cell.cell_type == "code"]


def imported(cells):
    """Every module that the cells import; and every one that they import from, a file of the
    reproduction by its own name.
    """
    nodes = [node for cell in cells for node in ast.walk(ast.parse(cell.source))]
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    several = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    files = [a.name for node in several if node.module == "reproduction" for a in node.names]
    modules = [node.module for node in several if node.module != "reproduction"]
    return plain, modules + [f"reproduction.{name}" for name in files]


def outputs(page):
    return [output for cell in page.cells if cell.cell_type == "code" for output in cell.outputs]


@pytest.mark.parametrize("name", NAMES)
def test_a_source_holds_no_output(name):
    page, cells = code_cells(name)
    nbformat.validate(page)
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
    assert len({cell["id"] for cell in page.cells}) == len(page.cells)


@pytest.mark.parametrize("name", VIEWS)
def test_a_page_has_no_logic_and_imports_the_report_only(name):
    _, cells = code_cells(name)
    views = [cell for cell in cells if "toy" not in cell.metadata.get("tags", [])]
    nodes = [node for cell in views for node in ast.walk(ast.parse(cell.source))]
    assert not [node for node in nodes if isinstance(node, LOGIC)]
    assert not imported(views)[0]
    plain, modules = imported(cells)
    assert set(plain) <= {"numpy"}
    assert all(module.startswith("reproduction.report") for module in modules)


def test_the_page_of_the_method_knows_numbers_and_the_mathematics_of_the_package_only():
    plain, modules = imported(code_cells("method")[1])
    rooms = {".".join(module.split(".")[:2]) for module in modules}
    assert set(plain) == {"numpy", "torch"} and rooms == {"featcal.core", "reproduction.report"}


def test_the_page_of_the_method_can_be_given_other_settings():
    names = ["ridge", "anchor_blend", "interpolation"]
    assert execute.declared("method", ROOT / "notebooks") == names


def told(cell):
    """What a cell that is tagged shows, but for pictures."""
    tagged = "nbval-check-output" in cell.metadata.get("tags", [])
    several = [output.data.items() for output in cell.outputs] if tagged else []
    return [{kind: text for kind, text in data if "image" not in kind} for data in several]


@pytest.fixture
def opened(monkeypatch):
    """The result files that are opened."""
    found = set()

    def spy(function):
        def read(path):
            found.update([Path(path)] if Path(path).is_file() else [])
            return function(path)

        return read

    for reader in ("read_scores", "read_json"):
        monkeypatch.setattr(evidence, reader, spy(getattr(evidence, reader)))
    evidence._KNOWN.clear()  # known tables open no file
    return found


@pytest.mark.parametrize("name", VIEWS)
def test_a_page_run_again_shows_what_git_has_and_reads_what_it_declares(name, opened):
    """Run it as nbval does, without a kernel; in one it runs those of the Makefile's KERNELS."""
    held = nbformat.read(ROOT / "book" / "pages" / f"{name}.ipynb", as_version=4)
    page = run_page(deepcopy(held), ROOT / "book" / "pages")
    assert {output.output_type for output in outputs(page)} == {"execute_result"}
    folder = ROOT / "results" / "mini"
    reads = [*SCRIPT.reads_of(ROOT / "notebooks" / f"{name}.ipynb"), "suite.json"]
    read = {path.relative_to(folder) for path in opened if path.is_relative_to(folder)}
    assert not [path for path in read if not any(path.is_relative_to(one) for one in reads)]
    html = "".join(output.data.get("text/html", "") for output in outputs(page))
    assert html.count("<table") <= MOST_TABLES
    shown = [[told(cell) for cell in one.cells if cell.cell_type == "code"] for one in (held, page)]
    assert any(shown[0]) and shown[0] == shown[1]


@pytest.mark.parametrize("name", VIEWS)
def test_a_page_runs_without_results_and_says_so(name, tmp_path):
    """Run it for the suite that has no results in git."""
    write_project(tmp_path, "paper", empty=True)
    given = {"suite": "paper"}
    page = run_page(with_parameters(ROOT / "notebooks" / f"{name}.ipynb", given), tmp_path)
    assert {output.output_type for output in outputs(page)} == {"execute_result"}
    told = [output.data["text/plain"] for output in outputs(page)]
    assert all(text.strip() and "nan" not in text for text in told)
    assert any("not run" in text for text in told)


def test_the_pipeline_waits_for_what_the_pages_declare_to_read():
    """Otherwise: python scripts/page_reads.py."""
    assert SCRIPT.TARGET.read_text() == SCRIPT.pages_yaml()


def test_the_page_of_the_page_extend_it_runs(results, tmp_path):
    text = (ROOT / "book" / "extend.md").read_text("utf-8")
    found = dict(re.findall(r"<!-- cell: (\w+) -->\n```python\n(.*?)```", text, re.DOTALL))
    cells = [
        nbformat.v4.new_code_cell(found["parameters"], metadata={"tags": ["parameters"]}),
        *(nbformat.v4.new_code_cell(found[name]) for name in ("page", "provenance")),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "mine.ipynb")
    assert SCRIPT.reads_of(tmp_path / "mine.ipynb") == ["scores/clip_b32-8", "ablate/clip_b32-8"]
    page = run_page(nbformat.read(tmp_path / "mine.ipynb", as_version=4), tmp_path)
    assert "Task Arithmetic" in outputs(page)[0].data["text/plain"]


@pytest.mark.parametrize(
    "settings", [{}, {"ridge": 5.0, "anchor_blend": 0.5, "interpolation": 1.0}]
)
def test_what_is_worked_out_by_hand_is_what_the_package_computes(settings, tmp_path):
    """The page holds every step against featcal.core itself, and fails where they differ."""
    page = run_page(with_parameters(ROOT / "notebooks" / "method.ipynb", settings), tmp_path)
    assert {output.output_type for output in outputs(page)} == {"execute_result"}
    assert sum(cell.source.count("assert ") for cell in page.cells if cell.cell_type == "code") == 5


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
    nbformat.write(
        nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": execute.KERNEL}),
        folder / "small.ipynb",
    )
    return folder


def test_executing_twice_gives_the_same_bytes(sources, tmp_path):
    given = {"suite": "files"}
    first, second = (
        execute_page("small", given, sources, tmp_path / f"out{i}").read_text() for i in range(2)
    )
    assert first == second and "files" in first
    for word in ('"name": "stderr"', "papermill", str(tmp_path)):
        assert word not in first


def test_a_page_run_in_this_process_is_the_page_of_a_kernel(sources, tmp_path):
    """What the tests above rely on."""
    page = nbformat.read(sources / "small.ipynb", as_version=4)
    source = "import warnings; warnings.warn('too many'); {'a': [suite]}"
    page.cells.append(nbformat.v4.new_code_cell(source, id="value"))
    nbformat.write(page, sources / "small.ipynb")
    own = execute_page("small", {"suite": "files"}, sources, tmp_path / "kernel")
    with without_kernels():
        other = execute_page("small", {"suite": "files"}, sources, tmp_path / "here")
    assert other.read_bytes() == own.read_bytes()


def test_an_unknown_page_is_refused_by_name(sources):
    with pytest.raises(MissingPath, match="table99.ipynb"):
        execute.declared("table99", sources)


def test_a_page_that_is_too_large_leaves_the_old_one_alone(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(execute, "LARGEST", 100)
    out = tmp_path / "out"
    out.mkdir()
    (out / "small.ipynb").write_text("old")
    with pytest.raises(BadFile, match="small.ipynb"):
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
