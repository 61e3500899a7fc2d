"""Who may import whom, read from the source of every file; nothing is run but the report's imports."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "featcal"

FOUNDATION = {
    "errors",
    "core",
    "blocks",
    "storage",
    "models",
    "settings",
    "experiments",
    "runs",
    "studies",
    "sweeps",
    "choices",
    "tunings",
}
BETWEEN = FOUNDATION | {"merging", "baselines", "data", "evaluation", "language", "calibration", "theory", "mini", "tuning"}
MAY_IMPORT = {
    "__init__": {
        "torchvision_mend",
        "settings",
        "blocks.plan",
        "calibration.calibrate",
        "merging.merge",
        "baselines.surgery",
        "baselines.prob_surgery",
        "baselines.mean_shift",
        "tuning.tune",
    },
    "torchvision_mend": set(),
    "errors": set(),
    "settings": {"errors"},
    "runs": {"errors", "settings", "baselines.settings"},
    "entries": {"errors", "settings", "runs", "merging.settings"},
    "sweeps": {"settings", "runs"},
    "choices": {"settings", "runs"},
    "tunings": {"settings", "runs"},
    "studies": {"settings", "runs", "entries", "sweeps", "choices", "tunings", "baselines.settings"},
    "experiments": {"errors", "settings", "runs", "entries", "studies"},
    "core": {"errors"},
    "blocks": {"errors", "core"},
    "storage": {"errors"},
    "models": {"errors", "storage", "blocks"},
    "merging": FOUNDATION,
    "baselines": FOUNDATION,
    "data": FOUNDATION,
    "evaluation": FOUNDATION,
    "language": FOUNDATION | {"data.public"},
    "calibration": FOUNDATION,
    "tuning": FOUNDATION | {"baselines", "calibration"},
    "profiling": set(),
    "theory": FOUNDATION,
    "interchange": {"errors", "storage", "models", "data.images"},
    "mini": BETWEEN,
    "suites": BETWEEN,
    "stages": BETWEEN | {"suites", "profiling", "report.execute"},
    "commands": BETWEEN | {"interchange", "suites", "stages"},
    "playground": BETWEEN | {"suites", "stages", "report"},
    "start": {"stages", "cli"},
    "cli": BETWEEN | {"interchange", "suites", "stages", "commands"},
    "report": {"errors", "settings", "storage.results"},
}
# `import featcal` itself is free of weight and order; a file that calls featcal.merge or featcal.calibrate names it like this
LAZY = {
    "merge": "merging",
    "surgery": "baselines",
    "prob_surgery": "baselines",
    "mean_shift": "baselines",
    "calibrate": "calibration",
    "tune": "tuning",
    "Calibration": "settings",
    "BlockPlan": "blocks",
    "Stack": "blocks",
}
FOREIGN = {
    "core": {"transformers", "datasets", "pandas", "matplotlib"},
    "settings": {"torch", "transformers"},
    "report": {"torch", "transformers", "datasets", "safetensors"},
    "profiling": {"torch", "transformers"},
}


def part_of(path: Path) -> str:
    """The first name below featcal: a folder, or a file of the package itself."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a file imports, wherever in the file, and of featcal's names loaded on first use."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "featcal":
            if node.attr in LAZY:
                yield node.lineno, f"featcal.{LAZY[node.attr]}.{node.attr}"


def within(name: str, allowed: set[str]) -> bool:
    return any(name == entry or name.startswith(f"{entry}.") for entry in allowed)


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_every_part_of_the_package_imports_only_what_its_layer_may():
    wrong = []
    for path in files():
        part = part_of(path)
        assert part in MAY_IMPORT, f"{path.relative_to(ROOT)}: {part} has no layer; give it one in {Path(__file__).name}"
        allowed = MAY_IMPORT[part] | {part}
        for line, name in imports(path):
            inside = name.removeprefix("featcal.")
            inside = LAZY.get(inside, inside)
            if name.startswith("featcal.") and inside != "__version__" and not within(inside, allowed):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {part} imports {inside}")
    assert not wrong, "\n".join(wrong)


def test_mathematics_settings_and_report_import_none_of_the_packages_they_do_not_know():
    wrong = []
    for path in files():
        for line, name in imports(path):
            if name.split(".")[0] in FOREIGN.get(part_of(path), set()):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: imports {name}")
    assert not wrong, "\n".join(wrong)


def test_importing_the_report_loads_neither_torch_nor_transformers():
    modules = [path.relative_to(ROOT).with_suffix("") for path in files() if part_of(path) == "report"]
    names = [".".join(module.parts).removesuffix(".__init__") for module in modules]
    assert names
    heavy = ("torch", "torchvision", "transformers", "datasets", "safetensors")
    code = f"import sys, importlib\nfor n in {names}: importlib.import_module(n)\nprint([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_no_file_of_the_package_outgrows_one_concept():
    long = {str(path.relative_to(ROOT)): lines for path in files() if (lines := len(path.read_text().splitlines())) > 260}
    assert not long


def test_package_files_that_only_open_a_folder_hold_a_docstring_and_nothing_else():
    for path in files():
        if path.name == "__init__.py" and path.parent not in (PACKAGE, PACKAGE / "errors"):  # errors: one name, several files
            statements = ast.parse(path.read_text()).body
            assert all(isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) for s in statements), path
