"""dvc.yaml: every stage depends on the code that can change its numbers, and the results in git are the ones it made."""

import ast
from functools import cache
from hashlib import md5
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
STAGES = (
    "prepare_data", "prepare", "merge", "merge_with_data", "calibrate", "adapt", "ablate", "evaluate", "measure", "corrupted",
    "sweep", "results", "page",
)  # fmt: skip

# What no number depends on: messages, settings (their values are params), paths, processes, the record of the run, counters of
# bytes, and files that appear complete or not at all.
EXEMPT = {
    "featcal/__init__.py",
    "featcal/errors/__init__.py",
    *(f"featcal/errors/{part}.py" for part in ("base", "files", "models", "runs", "settings")),
    "featcal/settings.py",
    "featcal/experiments.py",
    "featcal/entries.py",
    "featcal/runs.py",
    "featcal/studies.py",
    "featcal/sweeps.py",
    "featcal/torchvision_mend.py",
    "featcal/suites/suite.py",
    "featcal/stages/context.py",
    "featcal/stages/layout.py",
    "featcal/stages/workers.py",
    "featcal/storage/atomic.py",
    "featcal/storage/ledger.py",
    "featcal/storage/results.py",
}
# How many decimals a score has is storage/results.py's business.
WRITES_SCORES = ("ablate", "evaluate", "measure", "corrupted", "sweep", "results")


def module_file(name: str) -> str | None:
    """The file of a module of ours, below the root; None for anybody else's."""
    path = ROOT / Path(*name.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if name.split(".")[0] == "featcal" and file.is_file():
            return str(file.relative_to(ROOT))
    return None


@cache
def imported(file: str) -> frozenset[str]:
    """Files of ours that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found |= {module_file(name) for name in names}
    # `featcal.calibrate`, `featcal.merge` and the like are loaded by name in the package's own file
    lazy = {
        "featcal.calibrate(": "featcal/calibration/calibrate.py",
        "featcal.merge(": "featcal/merging/merge.py",
        "featcal.surgery(": "featcal/baselines/surgery.py",
        "featcal.prob_surgery(": "featcal/baselines/prob_surgery.py",
    }
    found |= {target for word, target in lazy.items() if word in (ROOT / file).read_text()}
    return frozenset(f for f in found if f and not only_a_docstring(f))


def only_a_docstring(file: str) -> bool:
    """Whether a file holds nothing that could be run."""
    body = ast.parse((ROOT / file).read_text()).body
    return all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in body)


def closure(file: str, stop: frozenset[str] = frozenset()) -> set[str]:
    """Every file of ours that running `file` can reach, not looking behind those of `stop`."""
    reached, open_ = set(), [file]
    while open_:
        current = open_.pop()
        if current not in reached:
            reached.add(current)
            open_ += [] if current in stop else imported(current)
    return reached


def dependencies(stage: str) -> list[str]:
    """The deps of a stage that are files of the package."""
    definition = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"][stage]
    return [dep for dep in definition.get("do", definition)["deps"] if dep.startswith("featcal/")]


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_depends_on_the_code_that_can_change_its_numbers(stage):
    needed = closure(f"featcal/stages/{stage}.py", frozenset(EXEMPT)) - EXEMPT
    if stage in WRITES_SCORES:
        needed.add("featcal/storage/results.py")
    deps = dependencies(stage)
    missing = {file for file in needed if not any(file == dep or file.startswith(dep + "/") for dep in deps)}
    assert not missing, f"dvc.yaml: {stage} also runs {sorted(missing)}"


@pytest.mark.parametrize("stage", STAGES)
def test_every_dependency_on_code_exists(stage):
    named = [dep.split("$")[0] for dep in dependencies(stage)]  # up to a part that is filled in per experiment
    assert all((ROOT / dep).exists() for dep in named)


def test_every_experiment_of_params_yaml_is_evaluated():
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    deps = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]["evaluate"]["do"]["deps"]
    folders = {"merge": "merged", "merge_with_data": "merged", "calibrate": "calibrated", "adapt": "adapted", "ablate": "ablated"}
    for section, folder in folders.items():
        for key in params[section]:
            name = key.split("-", 2)[2]
            assert f"outputs/${{suite}}/{folder}/${{key}}-{name}" in deps, key


def locked_outputs() -> dict[str, str]:
    """md5 of every output in dvc.lock, by path."""
    stages = yaml.safe_load((ROOT / "dvc.lock").read_text())["stages"]
    return {out["path"]: out["md5"] for stage in stages.values() for out in stage.get("outs", [])}


def test_results_in_git_are_what_the_pipeline_wrote():
    locked = {path: digest for path, digest in locked_outputs().items() if path.startswith(("results/", "book/pages/"))}
    assert any(path.startswith("results/mini/") for path in locked)
    wrong = [path for path, digest in locked.items() if md5((ROOT / path).read_bytes()).hexdigest() != digest]
    assert not wrong, f"these files are not what the pipeline wrote: {wrong}"


def test_every_result_and_page_in_git_is_an_output_of_the_pipeline():
    present = [*ROOT.glob("results/mini/*"), *ROOT.glob("book/pages/*.ipynb")]
    strangers = [str(file.relative_to(ROOT)) for file in present if str(file.relative_to(ROOT)) not in locked_outputs()]
    assert not strangers
