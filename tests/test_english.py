"""Docstrings of the library begin with a verb, and its names are the field's."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_A_BEGINNING = ("What", "Whether", "Those")
NOT_A_NAME = set(
    "found told tells held beside behind rivals mended settle parted both_ends joined lag numbers"
    " place words at_once Natural Share Count Within Once Tracks HandedOn Held Resident Streamed"
    " Published".split()
)


def nodes():
    for path in sorted((ROOT / "featcal").rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            yield node, node in tree.body, str(path.relative_to(ROOT))


def test_docstrings_begin_with_a_verb():
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    wrong = [
        f"{path}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"
        for node, _, path in nodes()
        if isinstance(node, documented) and (text := ast.get_docstring(node))
        if text.split()[0] in NOT_A_BEGINNING
    ]
    assert not wrong, "\n".join(wrong)


def test_functions_classes_arguments_and_module_names_are_plain():
    wrong = []
    for node, top, path in nodes():
        names = []
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.arg):
            names = [node.arg]
        elif top and isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [n.id for one in targets for n in ast.walk(one) if isinstance(n, ast.Name)]
        wrong += [f"{path}:{node.lineno}: {name}" for name in names if name in NOT_A_NAME]
    assert not wrong, "\n".join(wrong)
