"""Stage `page`: one notebook of the report, executed from result files."""

from featcal.stages.context import load_context


def run(key: str) -> None:
    """Write book/pages/<key>.ipynb."""
    from featcal.report.execute import execute_page

    context = load_context()
    root = context.layout.root
    execute_page(key, {"suite": context.suite.name}, root / "notebooks", root / "book" / "pages")
