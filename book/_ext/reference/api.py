"""The public Python names, from signatures and docstrings."""

import ast
import inspect
from pathlib import Path

from featcal.baselines import corrections
from featcal.baselines.adapters import BASELINES
from reference.markdown import block, docstring, escaped

# heading → file; a test compares the first group with featcal.__all__
PUBLIC = {
    "featcal.calibrate": "featcal/calibration/calibrate.py",
    "featcal.compare": "featcal/evaluation/compare.py",
    "featcal.load_batches": "featcal/data/batches.py",
    "featcal.merge": "featcal/merging/merge.py",
    "featcal.surgery": "featcal/baselines/corrections.py",
    "featcal.prob_surgery": "featcal/baselines/corrections.py",
    "featcal.mean_shift": "featcal/baselines/corrections.py",
    "featcal.Calibration": "featcal/settings.py",
    "featcal.BlockPlan": "featcal/models/plan.py",
    "featcal.Stack": "featcal/models/plan.py",
}
RESULTS = {
    "Result": "featcal/card.py",
    "Choice": "featcal/card.py",
    "BlockRecord": "featcal/card.py",
    "Agreement": "featcal/evaluation/compare.py",
    "Adapters": "featcal/baselines/adapters.py",
}
HELPERS = {
    "featcal.data.images.Preprocess": "featcal/data/images.py",
    "featcal.data.images.load_images": "featcal/data/images.py",
    "featcal.data.batches.draw_indices": "featcal/data/batches.py",
    "featcal.errors.FeatCalError": "featcal/errors.py",
}


def text(root: Path) -> str:
    """Return all groups as MyST."""
    groups = {"Functions and settings": PUBLIC, "Results": RESULTS, "Helpers": HELPERS}
    parts = []
    for title, names in groups.items():
        parts.append(f"## {title}\n\n")
        parts += [described(root, heading, file) for heading, file in names.items()]
    return "".join(parts)


def described(root: Path, heading: str, file: str) -> str:
    """Return the signature or the fields of one name, and its docstring."""
    name = heading.rpartition(".")[-1]
    tree = ast.parse((root / file).read_text("utf-8"))
    kind = BASELINES[name].__name__ if name in BASELINES else name
    node = next(n for n in tree.body if getattr(n, "name", "") == kind)
    meaning = docstring(ast.get_docstring(node) or "")
    shown, own = signature(node), methods(node)
    if name in BASELINES:
        shown, own = made(name), ""
    where = f"Defined in {escaped(file)}.\n\n"
    return f"### {escaped(heading)}\n\n{block(shown, 'python')}\n{meaning}{own}{where}"


def made(name: str) -> str:
    """Return a baseline's function, made from the fields of its class, as a signature."""
    function = ast.parse("def f(merged, experts, batches) -> Adapters: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    for parameter in list(inspect.signature(getattr(corrections, name)).parameters.values())[3:]:
        function.args.kwonlyargs.append(ast.arg(parameter.name))
        function.args.kw_defaults.append(ast.Constant(parameter.default))
    return _function(function, name)


def signature(node: ast.AST) -> str:
    """Return a function with its parameters, or a class with its fields."""
    if isinstance(node, ast.FunctionDef):
        return _function(node)
    assert isinstance(node, ast.ClassDef)
    fields = [ast.unparse(part) for part in node.body if isinstance(part, ast.AnnAssign)]
    init = [
        part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"
    ]
    if fields and not init:
        return f"class {node.name}:\n" + "\n".join(f"    {field}" for field in fields)
    return (
        f"class {_function(init[0], node.name)}"
        if init
        else f"class {node.name}({', '.join(map(ast.unparse, node.bases))})"
    )


def _function(node: ast.FunctionDef, name: str = "") -> str:
    """Return name(parameters) -> result, without `self` and private ones; long lists one a line."""
    node.args.args = [arg for arg in node.args.args if arg.arg not in ("self", "cls")]
    private = [arg.arg.startswith("_") for arg in node.args.kwonlyargs]
    for values in (node.args.kwonlyargs, node.args.kw_defaults):
        values[:] = [value for value, hidden in zip(values, private, strict=True) if not hidden]
    given = ast.unparse(node.args)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and not name else ""
    line = f"{name or node.name}({given}){returns}"
    if len(line) <= 90:
        return line
    arguments = ast.parse(f"def f({given}): ...").body[0]
    assert isinstance(arguments, ast.FunctionDef)
    return f"{name or node.name}(\n    " + ",\n    ".join(_split(arguments.args)) + f",\n){returns}"


def _split(args: ast.arguments) -> list[str]:
    """Return every parameter as written in a signature."""
    plain = args.args
    defaults = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    parts = [_parameter(arg, default) for arg, default in zip(plain, defaults, strict=True)]
    if args.vararg:
        parts.append(f"*{ast.unparse(args.vararg)}")
    elif args.kwonlyargs:
        parts.append("*")
    parts += [
        _parameter(arg, default)
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    return parts + ([f"**{ast.unparse(args.kwarg)}"] if args.kwarg else [])


def _parameter(arg: ast.arg, default: ast.expr | None) -> str:
    """Return a parameter with its default."""
    return ast.unparse(arg) + (f" = {ast.unparse(default)}" if default else "")


def methods(node: ast.AST) -> str:
    """Return the public methods of a class with the first line of their docstrings."""
    if not isinstance(node, ast.ClassDef):
        return ""
    public = [
        part
        for part in node.body
        if isinstance(part, ast.FunctionDef) and not part.name.startswith("_")
    ]
    lines = [f"`{_function(part)}`\n: {escaped((ast.get_docstring(part) or '').splitlines()[0])}\n\n" for part in public
             if ast.get_docstring(part)]  # fmt: skip
    return "".join(lines)
