"""The pipeline: every stage depends on the code that can change its numbers, and the results in git are the ones it made."""

import ast
from functools import cache
from hashlib import md5
from pathlib import Path

import pytest
import yaml

import pipeline
from featcal.experiments import load_experiments
from featcal.suites.suite import load_suite

ROOT = Path(__file__).parents[1]
STUDIES = ("samples", "cost", "corrupted", "sweep", "theory", "choices", "tune", "task_counts")
STAGES = (
    "prepare_data", "prepare", "merge", "merge_with_data", "calibrate", "adapt", "ablate", "multitask", "merge_pool",
    "calibrate_pool", "adapt_pool", "evaluate", "evaluate_pool", "measure", *STUDIES,
    "results", "results_pool", "page", "prepare_texts", "prepare_language", "merge_language", "calibrate_language",
    "adapt_language", "evaluate_language", "results_language",
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
    "featcal/pools.py",
    "featcal/studies.py",
    "featcal/sweeps.py",
    "featcal/choices.py",
    "featcal/tunings.py",
    "featcal/torchvision_mend.py",
    "featcal/suites/suite.py",
    "featcal/stages/context.py",
    "featcal/stages/layout.py",
    "featcal/stages/resident.py",
    "featcal/stages/workers.py",
    "featcal/storage/atomic.py",
    "featcal/storage/ledger.py",
    "featcal/storage/model_card.py",
    "featcal/storage/results.py",
}
# How many decimals a score has is storage/results.py's business.
WRITES_SCORES = (
    "ablate", "evaluate", "evaluate_pool", "evaluate_language", "measure", *STUDIES,
    "results", "results_pool", "results_language",
)  # fmt: skip


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
        "featcal.mean_shift(": "featcal/baselines/mean_shift.py",
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


BLOCKS, DEFINED = pipeline.blocks(), pipeline.stages()


def definition(stage: str) -> dict:
    """What the pipeline says of a stage, before parts are filled in per experiment."""
    return DEFINED[stage]


def dependencies(stage: str) -> list[str]:
    """The deps of a stage that are files of the package."""
    return [dep for dep in definition(stage)["deps"] if dep.startswith("featcal/")]


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_depends_on_the_code_that_can_change_its_numbers(stage):
    verb = definition(stage)["cmd"].split()[2]  # a stage of larger pools may run the same code
    needed = closure(f"featcal/stages/{verb}.py", frozenset(EXEMPT)) - EXEMPT
    if stage in WRITES_SCORES:
        needed.add("featcal/storage/results.py")
    deps = dependencies(stage)
    missing = {file for file in needed if not any(file == dep or file.startswith(dep + "/") for dep in deps)}
    assert not missing, f"dvc.yaml: {stage} also runs {sorted(missing)}"


def test_the_page_that_computes_depends_on_the_code_that_can_change_its_numbers():
    needed = closure("featcal/playground.py", frozenset(EXEMPT)) | closure("featcal/stages/page.py", frozenset(EXEMPT))
    deps = dependencies("playground")
    missing = {file for file in needed - EXEMPT if not any(file == dep or file.startswith(dep + "/") for dep in deps)}
    assert not missing, f"dvc.yaml: playground also runs {sorted(missing)}"


@pytest.mark.parametrize("stage", (*STAGES, "page_method", "playground"))
def test_every_dependency_on_code_exists(stage):
    named = [dep.split("$")[0] for dep in dependencies(stage)]  # up to a part that is filled in per experiment
    assert all((ROOT / dep).exists() for dep in named)


def test_every_experiment_of_params_yaml_is_evaluated():
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    deps = definition("evaluate")["deps"]
    folders = {"merge": "merged", "merge_with_data": "merged", "calibrate": "calibrated", "adapt": "adapted", "ablate": "ablated"}
    for section, folder in folders.items():
        for key in params[section]:
            name = key.split("-", 2)[2]
            assert f"outputs/${{suite}}/{folder}/${{key}}-{name}" in deps, key


def made_by(stage: str, keys: list[str]) -> list[str]:
    """Folders of models that the stages of one block write, for these keys."""
    written = [out for out in definition(stage)["outs"] if isinstance(out, str) and "/run/" not in out]
    return [out.replace("${key}", key) for out in written for key in keys]


@pytest.mark.parametrize(
    ("stage", "folder"),
    [("merge", "merged"), ("merge_with_data", "merged"), ("calibrate", "calibrated"), ("adapt", "adapted")],
)
def test_every_model_of_params_yaml_is_made_by_one_stage_which_knows_its_settings(stage, folder):
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    keys = list(params[BLOCKS[stage]["foreach"].strip("${}")])
    made = made_by(stage, keys)
    assert sorted(made) == sorted(f"outputs/${{suite}}/{folder}/{key}" for key in params[stage])
    known = {name.replace("${key}", key) for name in definition(stage)["params"] if isinstance(name, str) for key in keys}
    assert {f"{stage}.{key}.${{suite}}" for key in params[stage]} <= known


def test_every_model_of_a_larger_pool_is_made_and_evaluated():
    made = {"merge": ("merge_pool", "merged"), "calibrate": ("calibrate_pool", "calibrated"), "adapt": ("adapt_pool", "adapted")}
    deps = definition("evaluate_pool")["deps"]
    pools = load_experiments(ROOT / "params.yaml").pools
    for key, pool in ((key, pool) for key, pool in pools.items() if isinstance(pool.pool, int)):
        for part, (stage, folder) in made.items():
            wanted = {f"outputs/${{suite}}/{folder}/${{key}}{name.removeprefix(key)}" for name in getattr(pool, part)}
            assert wanted == {out for out in definition(stage)["outs"] if f"/{folder}/" in out} <= set(deps), (stage, key)


@pytest.mark.parametrize("stage", ["merge_pool", "calibrate_pool", "adapt_pool", "evaluate_pool"])
def test_a_larger_pool_depends_on_every_folder_it_reads_experts_from(stage):
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    suite = load_suite(ROOT, "mini")
    for key, pool in params["larger_pools"].items():
        role, size = pool["role"], pool["pool"]
        given = {d.replace("${item.role}", role).replace("${item.pool}", str(size)) for d in definition(stage)["deps"]}
        for smaller in [n for n in suite.pools if n <= size]:
            assert f"outputs/${{suite}}/prepared/{role}-{smaller}" in given, key


def locked_outputs() -> dict[str, str]:
    """md5 of every output in dvc.lock, by path."""
    locks = pipeline.files(name="dvc.lock")
    stages = [stage for lock in locks for stage in yaml.load(lock.read_text(), yaml.CSafeLoader)["stages"].values()]
    return {out["path"]: out["md5"] for stage in stages for out in stage.get("outs", [])}


def test_results_in_git_are_what_the_pipeline_wrote():
    locked = {path: digest for path, digest in locked_outputs().items() if path.startswith(("results/", "book/pages/"))}
    assert any(path.startswith("results/mini/") for path in locked)
    wrong = [path for path, digest in locked.items() if md5((ROOT / path).read_bytes()).hexdigest() != digest]
    assert not wrong, f"these files are not what the pipeline wrote: {wrong}"


def test_every_result_and_page_in_git_is_an_output_of_the_pipeline():
    present = [*ROOT.glob("results/mini/*"), *ROOT.glob("book/pages/*.ipynb")]
    locked = locked_outputs()
    assert not [str(file.relative_to(ROOT)) for file in present if str(file.relative_to(ROOT)) not in locked]
