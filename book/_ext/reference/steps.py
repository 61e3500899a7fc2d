"""The steps of a calibration, from the docstrings and sources of the functions that do them."""

import ast
import re
from pathlib import Path

from reference.markdown import block, escaped

SENTENCE_END = re.compile(r"(?<=\.)(?<!Eq\.)(?<!Eqs\.) ")
# title → the functions or classes that do the step; a test requires that all of them exist
STEPS = {
    "Open the models and check that they fit": ["featcal.calibration.features.open_models"],
    "Check the plan by replaying it": ["featcal.models.blocks.check_replay"],
    "Catch the first inputs of both tracks": ["featcal.calibration.features.first_features"],
    "Observe a block": ["featcal.calibration.observe.observe"],
    "Form the systems": [
        "featcal.calibration.block.add_task_systems",
        "featcal.core.ridge.task_system",
    ],
    "Solve them": [
        "featcal.calibration.block.solve_systems",
        "featcal.core.ridge.ridge_by_halves",
        "featcal.core.ridge.solve_ridge",
    ],
    "Load the solutions and advance": [
        "featcal.models.modules.load_side_by_side",
        "featcal.calibration.features.advance_student",
    ],
    "Write, and resume": [
        "featcal.calibration.scratch.RunFolder",
        "featcal.calibration.scratch.copy_with",
    ],
    "Measure the result": [
        "featcal.calibration.choose.divergences",
        "featcal.calibration.choose.choose",
    ],
}


def text(root: Path) -> str:
    """Return all steps as MyST."""
    parts = []
    for number, (title, names) in enumerate(STEPS.items(), 1):
        parts.append(f"## {number}. {title}\n\n")
        parts += [described(root, name) for name in names]
    return "".join(parts)


def described(root: Path, dotted: str) -> str:
    """Return one function's first sentence, and its source in a fold."""
    path, node, source = definition(root, dotted)
    paragraph = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    sentence = SENTENCE_END.split(paragraph)[0]
    fold = f"{path}, line {node.lineno}"
    code = block(source, "python")
    return f"`{dotted}`\n: {escaped(sentence)}\n\n:::{{dropdown}} {fold}\n{code}:::\n\n"


def definition(root: Path, dotted: str) -> tuple[str, ast.FunctionDef | ast.ClassDef, str]:
    """Return the file, the node and the source of a function or class.

    Raises: LookupError where the module does not define the name.
    """
    module, _, name = dotted.rpartition(".")
    path = f"{module.replace('.', '/')}.py"
    source = (root / path).read_text("utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return path, node, ast.get_source_segment(source, node) or ""
    raise LookupError(f"{path} does not define {name}")
