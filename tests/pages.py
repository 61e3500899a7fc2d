"""Pages run in this process instead of a kernel each: the same cells, parameters and outputs.

What only a kernel can show (another process, other bytes) is asked of a small page in
test_notebooks.py, and of those that the Makefile names by nbval.
"""

import ast
import io
import warnings
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat
from IPython.core.formatters import DisplayFormatter
from nbformat import NotebookNode
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

SHOWN_WARNINGS = (UserWarning, RuntimeWarning, FutureWarning)  # that a kernel prints


def run_page(page: NotebookNode, folder: Path) -> NotebookNode:
    """Fill in the outputs of a page, its code run in a fresh namespace from `folder`."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with chdir(folder):
        cells = (cell for cell in page.cells if cell.cell_type == "code")
        for count, cell in enumerate(cells, start=1):
            outputs = list(_outputs(cell.source, namespace, count))
            cell.execution_count, cell.outputs = count, outputs
    return page


def _outputs(source: str, namespace: dict[str, Any], count: int) -> Iterator[NotebookNode]:
    """Yield the outputs of a cell: its prints, its warnings and its last value."""
    tree, last = ast.parse(source), None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("ignore")
        for kind in SHOWN_WARNINGS:
            warnings.simplefilter("default", kind)
        exec(compile(tree, "<cell>", "exec"), namespace)
        value = eval(compile(last, "<cell>", "eval"), namespace) if last else None
        data, metadata = DisplayFormatter().format(value) if value is not None else ({}, {})
    err.write("".join(f"{warning.category.__name__}: {warning.message}\n" for warning in warned))
    for name, text in (("stdout", out.getvalue()), ("stderr", err.getvalue())):
        if text:
            yield nbformat.v4.new_output("stream", name=name, text=text)
    if data:
        how = {"data": data, "metadata": metadata, "execution_count": count}
        yield nbformat.v4.new_output("execute_result", **how)


def with_parameters(source: Path, parameters: dict[str, Any]) -> NotebookNode:
    """Return a page with a cell of parameters after its own, as papermill inserts it."""
    return parameterize_notebook(load_notebook_node(str(source)), parameters)


@contextmanager
def without_kernels() -> Iterator[None]:
    """Inside the `with`, `execute_page` and the stage `page` run their pages in this process."""

    def execute_notebook(source, target, parameters, *, cwd, **_):
        nbformat.write(run_page(with_parameters(source, parameters), Path(cwd)), target)

    with patch("papermill.execute_notebook", execute_notebook):
        yield
