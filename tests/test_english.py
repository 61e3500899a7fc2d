"""Docstrings of the packages in PLAIN begin with a verb, and their names are the field's."""

import ast

from test_layering import ROOT, modules, parsed

PLAIN = ("featcal", "reproduction")  # packages that the tests cover
NOT_A_BEGINNING = ("What", "Whether", "Those")
NOT_A_NAME = set(
    "found told tells held beside behind rivals mended settle parted both_ends joined lag numbers"
    " place words at_once Natural Share Count Within Once Tracks HandedOn Held Resident Streamed"
    " Published".split()
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def nodes():
    """Yield every node of the sources in PLAIN, and its location."""
    for path in (path for name, path in modules().items() if name.startswith(PLAIN)):
        for node in ast.walk(parsed(path)):
            yield node, f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def test_docstrings_begin_with_a_verb():
    documented = (one for one in nodes() if isinstance(one[0], DOCUMENTED))
    texts = {where: ast.get_docstring(node) for node, where in documented}
    wrong = [f"{w}: {t}" for w, t in texts.items() if t and t.split()[0] in NOT_A_BEGINNING]
    assert not wrong, "\n".join(wrong)


def test_names_of_functions_classes_arguments_and_variables_are_plain():
    wrong = []
    for node, where in nodes():
        names = []
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.arg):
            names = [node.arg]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names = [node.id]
        wrong += [f"{where}: {name}" for name in names if name in NOT_A_NAME]
    assert not wrong, "\n".join(wrong)
