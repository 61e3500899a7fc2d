"""Notebooks: pages without logic, run on the results in git and on none, to the byte.

One page is more than a view of results: the method is worked out on its page.
"""

import ast
import importlib.util
import re
from copy import deepcopy
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from pages import run_page, with_parameters, without_kernels
from synthetic_results import write_project

from featcal.errors import BadFile, MissingPath
from pipeline import NOTEBOOKS, ROOT
from reproduction.report import evidence
from reproduction.report.claims import claims
from reproduction.report.page import LISTED
from reproduction.stages import page as execute
from reproduction.stages.page import execute_page

VIEWS = [name for name in NOTEBOOKS if name != "method"]
_spec = importlib.util.spec_from_file_location("pages_yaml", ROOT / "scripts" / "page_reads.py")
SCRIPT = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(SCRIPT)
LOGIC = (
    ast.FunctionDef, ast.ClassDef, ast.For, ast.While, ast.If, ast.IfExp, ast.Lambda, ast.Try, ast.comprehension,
)  # fmt: skip


def code_cells(page):
    return [cell for cell in page.cells if cell.cell_type == "code"]


def nodes_of(cells):
    return [node for cell in cells for node in ast.walk(ast.parse(cell.source))]


def imported(cells):
    """Return the modules that cells import, and the modules that they import names from."""
    nodes = nodes_of(cells)
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain, {node.module for node in nodes if isinstance(node, ast.ImportFrom)}


def outputs(page):
    """Return all outputs of a page, each of which is the value of a cell."""
    result = [output for cell in code_cells(page) for output in cell.outputs]
    assert {output.output_type for output in result} == {"execute_result"}
    return result


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_source_holds_no_output_no_logic_and_no_import_but_of_the_report(name):
    page = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    cells = code_cells(page)
    nbformat.validate(page)
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
    assert len({cell["id"] for cell in page.cells}) == len(page.cells)
    plain, modules = imported(cells)
    if name == "method":  # with numbers and the mathematics of the package
        rooms = {".".join(module.split(".")[:2]) for module in modules}
        assert plain == {"numpy", "torch"} and rooms == {"featcal.core", "reproduction.report"}
        return
    views = [cell for cell in cells if "toy" not in cell.metadata.get("tags", [])]
    assert not [node for node in nodes_of(views) if isinstance(node, LOGIC)]
    assert not imported(views)[0] and plain <= {"numpy"}
    assert all(module.startswith("reproduction.report") for module in modules)


def shown(page):
    """Return the outputs of tagged cells without pictures."""
    tagged = [c for c in code_cells(page) if "nbval-check-output" in c.metadata.get("tags", [])]
    outputs = [output.data.items() for cell in tagged for output in cell.outputs]
    return [{kind: text for kind, text in data if "image" not in kind} for data in outputs]


@pytest.fixture
def opened(monkeypatch):
    """Collect the result files that are read, or would be if their tables were not cached."""
    files, original = set(), evidence.Evidence.table

    def spy(function):
        def read(path):
            files.update([Path(path)] if Path(path).is_file() else [])
            return function(path)

        return read

    def table(self, kind):
        others = {"scores", "ablate", "expert_seeds"} if kind in ("scores", "corrupted") else set()
        files.update(path for path in map(self.path, {kind} | others) if path.is_file())
        return original(self, kind)

    monkeypatch.setattr(evidence.Evidence, "table", table)
    for reader in ("read_scores", "read_json"):
        monkeypatch.setattr(evidence, reader, spy(getattr(evidence, reader)))
    return files


@pytest.mark.parametrize("name", VIEWS)
def test_a_page_run_again_shows_what_git_has_and_reads_what_it_declares(name, opened):
    """Run it as nbval does, without a kernel; in one it runs those of the Makefile's KERNELS."""
    committed = nbformat.read(ROOT / "book" / "pages" / f"{name}.ipynb", as_version=4)
    page = run_page(deepcopy(committed), ROOT / "book" / "pages")
    html = "".join(output.data.get("text/html", "") for output in outputs(page))
    assert html.count("<table") <= 6  # folds included
    assert shown(committed) and shown(committed) == shown(page)
    folder = ROOT / "results" / "mini"
    reads = [*SCRIPT.reads_of(ROOT / "notebooks" / f"{name}.ipynb"), "suite.json"]
    read = {path.relative_to(folder) for path in opened if path.is_relative_to(folder)}
    assert not [path for path in read if not any(path.is_relative_to(part) for part in reads)]
    assert "not Meta’s" in html or not [path for path in read if "vit_s" in str(path)]


@pytest.fixture(scope="module")
def nothing(tmp_path_factory):
    """A project whose suite has no results."""
    folder = tmp_path_factory.mktemp("nothing")
    write_project(folder, "paper", empty=True)
    return folder


@pytest.mark.parametrize("name", VIEWS)
def test_a_page_runs_without_results_and_says_so(name, nothing):
    source = with_parameters(ROOT / "notebooks" / f"{name}.ipynb", {"suite": "paper"})
    texts = [output.data["text/plain"] for output in outputs(run_page(source, nothing))]
    assert all(text.strip() and "nan" not in text for text in texts)
    assert any("not run" in text for text in texts)


def test_the_pipeline_waits_for_what_the_pages_declare_to_read():
    """Otherwise: python scripts/page_reads.py."""
    assert SCRIPT.TARGET.read_text() == SCRIPT.pages_yaml()


def test_the_list_of_claims_leaves_numbers_to_the_pages_that_list_their_own():
    sources = {name: (ROOT / "notebooks" / f"{name}.ipynb").read_text() for name in NOTEBOOKS}
    listing = {name for name, text in sources.items() if ".verdicts(" in text}
    assert listing == {claim.location for claim in claims() if claim.location.startswith(LISTED)}


def test_the_page_of_the_page_extend_it_runs(results, tmp_path):
    text = (ROOT / "book" / "extend.md").read_text("utf-8")
    cell_texts = dict(re.findall(r"<!-- cell: (\w+) -->\n```python\n(.*?)```", text, re.DOTALL))
    cells = [new_code_cell(cell_texts[name]) for name in ("parameters", "page", "provenance")]
    cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(new_notebook(cells=cells), tmp_path / "mine.ipynb")
    assert SCRIPT.reads_of(tmp_path / "mine.ipynb") == ["scores/clip_b32-8", "ablate/clip_b32-8"]
    page = run_page(nbformat.read(tmp_path / "mine.ipynb", as_version=4), tmp_path)
    assert "Task Arithmetic" in page.cells[1].outputs[0].data["text/plain"]


def test_what_is_worked_out_by_hand_is_what_the_package_computes(tmp_path):
    """The page holds every step against featcal.core and fails where they differ; here elsewhere."""
    settings = {"ridge": 5.0, "anchor_blend": 0.5, "interpolation": 1.0}
    page = run_page(with_parameters(ROOT / "notebooks" / "method.ipynb", settings), tmp_path)
    assert outputs(page)
    assert sum(cell.source.count("assert ") for cell in code_cells(page)) == 5


@pytest.fixture
def small(tmp_path):
    """Write and execute a small page of its own, which needs no results and little time."""
    sources = tmp_path / "notebooks"
    sources.mkdir()

    def execute_small(value, out):
        cells = [
            new_code_cell('suite = "mini"', metadata={"tags": ["parameters"]}, id="parameters"),
            new_code_cell("import sys, warnings; print('a warning', file=sys.stderr)", id="first"),
            new_code_cell(f"warnings.warn('too many'); {value}", id="value"),
        ]
        page = new_notebook(cells=cells, metadata={"kernelspec": execute.KERNEL})
        nbformat.write(page, sources / "small.ipynb")
        return execute_page("small", {"suite": "files"}, sources, tmp_path / out)

    return execute_small


def test_a_page_has_the_same_bytes_in_a_kernel_and_in_this_process(small, tmp_path):
    """The tests above rely on it."""
    kernel = small("{'a': [suite]}", "kernel").read_text()
    with without_kernels():
        assert small("{'a': [suite]}", "here").read_text() == kernel
    assert "files" in kernel
    for word in ('"name": "stderr"', "papermill", str(tmp_path)):
        assert word not in kernel


def test_a_page_that_fails_or_is_too_large_replaces_none(small, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/small.ipynb").write_text("old")
    with without_kernels(), pytest.raises(NameError, match="no_such_name"):
        small("no_such_name", "out")
    monkeypatch.setattr(execute, "LARGEST", 100)
    with without_kernels(), pytest.raises(BadFile, match="small.ipynb"):
        small("suite", "out")
    left = [(path.name, path.read_text()) for path in (tmp_path / "out").iterdir()]
    assert left == [("small.ipynb", "old")]


def test_an_unknown_page_is_refused_by_name():
    with pytest.raises(MissingPath, match="table99.ipynb"):
        execute.run("table99")
