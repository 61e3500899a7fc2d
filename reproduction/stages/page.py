"""Stage `page`: one notebook of the report, executed from result files; the suite is told to those
that declare it.
"""

from reproduction.stages.context import load_context


def run(key: str) -> None:
    """Write book/pages/<key>.ipynb."""
    from reproduction.report.execute import declared, execute_page

    context = load_context()
    root = context.layout.root
    known = declared(
        key, root / "notebooks"
    )  # a page that works on a toy, or reads params.yaml itself, asks for no suite
    given = {"suite": context.suite.name} if "suite" in known else {}
    execute_page(key, given, root / "notebooks", root / "book" / "pages")
