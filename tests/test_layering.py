"""Rules for imports between packages, read from the source of every file."""

import ast
from functools import cache
from pathlib import Path

import networkx

import featcal

ROOT = Path(__file__).parents[1]
PACKAGES = ("featcal", "reproduction")
FOUNDATION = {"errors", "settings", "files", "card", "record", "core", "models"}
MAY_IMPORT = {  # packages of the library, and single files where not all of a package is meant
    "featcal": set(),
    "__main__": {"cli"},
    "errors": set(),
    "settings": {"errors"},
    "files": {"errors"},
    "card": {"errors", "settings", "files", "models.checkpoint"},
    "record": {"card", "files"},
    "core": {"errors"},
    "models": {"errors", "settings", "files", "core"},
    "data": FOUNDATION,
    "calibration": FOUNDATION,
    "merging": FOUNDATION | {"data.texts", "calibration"},
    "baselines": FOUNDATION,
    "evaluation": FOUNDATION | {"data", "calibration"},
    "interchange": FOUNDATION | {"data.images"},
    "cli": FOUNDATION | {"data", "calibration", "merging", "evaluation", "interchange"},
}
KNOWN = {"experiments", "results"}
REPRODUCTION = {  # rooms of the reproduction, among themselves; all of them may import the library
    "reproduction": set(),
    "experiments": {"results"},
    "theory": {"engine.context", "engine.features", "engine.samples", "results"},
    "report": {"results"},
    "results": set(),
    "language": {"prepare", "mini"},
    "mini": {"experiments", "prepare.tasks", "prepare.texts"},
    "prepare": KNOWN,
    "profiling": set(),
    "engine": KNOWN | {"language", "prepare", "profiling"},
    "field": KNOWN | {"prepare", "engine"},
    "studies": KNOWN | {"engine", "field", "mini.images", "prepare", "stages.prepare", "theory"},
    "doctor": KNOWN | {"engine.context", "language", "report.paper", "prepare"},
    "stages": KNOWN | {"engine", "mini", "prepare", "report.artifact"},
}
FEATCAL_IN_REPORT = {"errors", "settings", "files"}  # the library without torch
HEAVY = set("dvc papermill pandas matplotlib seaborn scipy sklearn nbclient lm_eval".split())
MODELS = set("torch torchvision transformers datasets safetensors".split())
FOREIGN = {  # what some rooms do not know, of other people's packages
    "featcal": HEAVY,
    "featcal.core": {"transformers", "datasets"},
    **dict.fromkeys((f"featcal.{name}" for name in FEATCAL_IN_REPORT), MODELS),
    "reproduction.report": MODELS,
    "reproduction.results": MODELS,
}


@cache
def modules() -> dict[str, Path]:
    """Every file of both packages by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Return line and full name of every import, and of featcal's names loaded on first use."""
    found, lazy = [], featcal._MODULES
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "featcal":
            found += [(node.lineno, lazy[node.attr])] if node.attr in lazy else []
    return found


def home(name: str) -> str | None:
    """The module of ours that a name is in, or is."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name or None


def room(module: str) -> str:
    """The first name below the package; of the package's own file, the package."""
    package, _, inside = module.partition(".")
    return inside.partition(".")[0] or package


@cache
def edges() -> list[tuple[str, str, str]]:
    """Importing module, imported module, and where; both ours."""
    return [
        (module, there, f"{path.relative_to(ROOT)}:{line}")
        for module, path in modules().items()
        for line, name in imports(path)
        if (there := home(name)) and there != module
    ]


def within(name: str, allowed: set[str]) -> bool:
    return any(name == entry or name.startswith(f"{entry}.") for entry in allowed)


def test_every_room_imports_only_what_its_floor_may():
    wrong = []
    for module, there, place in edges():
        package, _, inside = there.partition(".")
        table, own = MAY_IMPORT if package == "featcal" else REPRODUCTION, room(module)
        if not module.startswith(package):  # the reproduction may use all of the library
            allowed = FEATCAL_IN_REPORT if own == "report" else {inside}
        elif not inside or own == room(there):
            continue
        else:
            assert own in table, f"{place}: give the room {own} a floor in {Path(__file__).name}"
            allowed = table[own]
        if not within(inside, allowed):
            wrong.append(f"{place}: {own} imports {there}")
    assert not wrong, "\n".join(wrong)


def test_no_file_imports_one_that_imports_it():
    """However long the way round, and for types too; names loaded on first use are no imports."""
    graph = networkx.DiGraph((one, other) for one, other, _ in edges() if one not in PACKAGES)
    assert next(networkx.simple_cycles(graph), None) is None


def test_rooms_import_none_of_the_packages_they_do_not_know():
    wrong = []
    for module, path in modules().items():
        unknown = set[str]().union(*(names for r, names in FOREIGN.items() if within(module, {r})))
        used = ((line, name) for line, name in imports(path) if name.split(".")[0] in unknown)
        wrong += [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in used]
    assert not wrong, "\n".join(wrong)
