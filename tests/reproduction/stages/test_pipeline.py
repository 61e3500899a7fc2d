"""Stages depend on what can change their numbers, and results in git are what they wrote."""

import json
import re
from functools import cache
from hashlib import md5
from pathlib import Path

import pytest
import yaml
from resolved import laid_out, resolved, settings_of_stages
from test_layering import home, imports, modules, parsed

import pipeline
from pipeline import ROOT
from reproduction.experiments import MAIN, MORE, load_experiments, studies
from reproduction.prepare.suite import load_suite
from reproduction.stages import command

DEFINED = pipeline.stages()
STAGES = [name for name, stage in DEFINED.items() if stage["cmd"].startswith("featcal stage ")]

# No number depends on these: messages, settings (their values are params), paths, processes, run
# records, and atomic writes.
EXEMPT = {
    "featcal/__init__.py", "featcal/errors.py", "featcal/settings.py", "featcal/files.py", "featcal/card.py",
    "reproduction/experiments.py", "reproduction/results.py", "reproduction/prepare/suite.py",
    "reproduction/engine/context.py", "reproduction/engine/workers.py",
}  # fmt: skip
# reproduction/results.py rounds scores.
WRITES_SCORES = (*studies(), *"evaluate measure study gather headline claims artifact".split())


@cache
def imported(file: str) -> frozenset[str]:
    """Return the files of this project that a file imports."""
    homes = {modules().get(home(name)) for _, name in imports(ROOT / file)} - {None}
    paths = {path for path in homes if parsed(path).body[1:]}  # more than a docstring
    if file == "featcal/merging/registry.py":  # loads methods by name
        paths |= set((ROOT / "featcal/merging/methods").glob("*.py"))
    return frozenset(str(path.relative_to(ROOT)) for path in paths)


def closure(file: str, stop: frozenset[str] = frozenset()) -> set[str]:
    """Return the files of this project that `file` imports, without the imports of `stop`."""
    reached, open_ = set(), [file]
    while open_:
        current = open_.pop()
        if current not in reached:
            reached.add(current)
            open_ += [] if current in stop else imported(current)
    return reached


def dependencies(stage: str) -> list[str]:
    """Return the dependencies of a stage on code."""
    return [dep for dep in DEFINED[stage]["deps"] if dep.startswith(("featcal/", "reproduction/"))]


def programs(stage: str) -> set[str]:
    """Return the files that a stage runs: of all studies for the stage that several share."""
    verb = DEFINED[stage]["cmd"].split()[2]
    verbs = [name for name in studies() if name not in STAGES] if verb.startswith("$") else [verb]
    modules = {command.STAGES.get(name, f"studies.{name}").partition(":")[0] for name in verbs}
    return {f"reproduction/{module.replace('.', '/')}.py" for module in modules}


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_depends_on_the_code_that_can_change_its_numbers(stage):
    needed = set().union(*(closure(file, frozenset(EXEMPT)) for file in programs(stage))) - EXEMPT
    needed |= {"reproduction/results.py"} if stage in WRITES_SCORES else set()
    deps = dependencies(stage)
    missing = {f for f in needed if not any(f == dep or f.startswith(f"{dep}/") for dep in deps)}
    assert not missing, f"{stage} also runs {sorted(missing)}"


def test_every_dependency_on_code_exists():
    for stage in STAGES:  # up to a part that is filled in per experiment
        assert all((ROOT / dep.split("$")[0]).exists() for dep in dependencies(stage)), stage


RECORD = "run.json"  # seconds and machine, which are gathered from another folder
# by what makes them, the kind of folder they lie in
MODELS = {"merge": "merged", "calibrate": "calibrated", "adapt": "adapted"}


@pytest.mark.parametrize("section", MODELS)
def test_every_model_of_params_yaml_is_made_by_one_stage_and_scored(section):
    graph = resolved()
    for run in getattr(load_experiments(ROOT / "params.yaml"), section).values():
        folder = f"outputs/mini/{MODELS[section]}/{run.key}"
        assert folder in graph.nodes[f"{section}@{run.key}"]["outs"], run
        if run.role != "mpnet":  # a study alone starts from its merged model
            assert folder in graph.nodes[f"evaluate@{run.key}"]["deps"], run


def test_every_study_is_gathered():
    graph = resolved()
    cmds = {cmd: name for name, cmd in graph.nodes.data("cmd")}
    for study, runs in load_experiments(ROOT / "params.yaml").studies.items():
        for key in runs:
            gather = cmds[f"featcal stage gather {study}/{key}"]
            outs = graph.nodes[cmds[f"featcal stage {study} {key}"]]["outs"]
            assert graph.nodes[gather]["deps"] & outs == {f"outputs/mini/{study}/{key}"}
            # `dvc repro` knows the results on request alone
            requested = gather.replace("request@", "requested@")
            assert f"results/mini/{study}/{key}" in graph.nodes[requested]["outs"]


def test_a_larger_pool_is_merged_from_every_folder_with_its_experts():
    pools = load_suite(ROOT, "mini").pools
    for run in load_experiments(ROOT / "params.yaml").merge.values():
        if run.pool in (14, 20):
            needed = {f"outputs/mini/prepared/{run.role}-{n}" for n in pools if n <= run.pool}
            assert needed <= resolved().nodes[f"merge@{run.key}"]["deps"]


def test_every_page_shows_files_that_the_pipeline_writes():
    """And every notebook is a page with a stage, by its own name where it shows results."""
    written = set().union(*(outs for _, outs in resolved().nodes.data("outs")))
    pages = yaml.safe_load(pipeline.PAGES.read_text())["pages"]
    files = {name for page_files in pages.values() for name in page_files.values()} - {"."}
    kinds = {str(Path(path).parent) for path in written}
    assert not {f"results/mini/{name}" for name in files} - written - kinds
    assert {source.stem for source in (ROOT / "notebooks").glob("*.ipynb")} == {*pages, "method"}


def test_claims_and_the_page_for_reviewers_are_made_anew_after_every_run():
    graph = resolved()
    outs = set().union(*(outs for _, outs in graph.nodes.data("outs")))
    folders = {path for path in outs if path.startswith("results/") and path.count("/") == 3}
    kinds = {str(Path(path).parent) for path in folders}
    assert kinds and kinds <= graph.nodes["claims"]["deps"] & graph.nodes["artifact"]["deps"]


@pytest.mark.parametrize("file", pipeline.files(), ids=lambda f: str(f.parent.relative_to(ROOT)))
def test_the_stages_in_a_lock_are_those_of_its_part_of_the_pipeline(file):
    lock, path = file.with_name("dvc.lock"), str(file.relative_to(ROOT))
    in_lock = set(yaml.safe_load(lock.read_text())["stages"]) if lock.is_file() else set()
    stages = {name for name, at in resolved().nodes.data("file") if at == path}
    assert stages
    assert in_lock - stages == set(), f"{lock} has stages that no longer exist; delete them there"
    assert stages - in_lock == set(), f"{file}: stages that were never run; run `dvc repro`"


@cache
def locked(kind: str) -> dict[str, str]:
    """Return the md5 of all outs or deps in the locks by path; empty where never computed."""
    locks = [yaml.load(f.read_text(), yaml.CSafeLoader) for f in pipeline.files(name="dvc.lock")]
    stages = [stage for lock in locks for stage in lock["stages"].values()]
    entries = [entry for stage in stages for entry in stage.get(kind, [])]
    return {entry["path"]: entry.get("md5", "") for entry in entries}


def test_results_in_git_are_what_the_pipeline_wrote():
    folders = ("results/", "book/pages/")
    written = {path: md5 for path, md5 in locked("outs").items() if path.startswith(folders)}
    assert any(path.startswith("results/mini/") for path in written)
    wrong = [path for path, digest in written.items() if digest_of(ROOT / path) != digest]
    assert not wrong, f"these files are not what the pipeline wrote: {wrong}"


def test_results_in_git_are_the_files_that_were_gathered():
    """Including those on request, which are outputs of a stage that leaves them as they are."""
    graph, read = resolved(), set()
    for stage in graph:
        if stage.startswith(("gather@", "request@")):
            read |= {dep for dep in graph.nodes[stage]["deps"] if dep.startswith("outputs/")}
    assert len(read) > len(studies())
    copies = {path: ROOT / path.replace("outputs", "results", 1) for path in read}
    wrong = [p for p, copy in copies.items() if digest_of(copy, RECORD) != locked("deps")[p]]
    assert not wrong, f"results/ has other files than the stages found in {wrong}"


def digest_of(path: Path, left_out: str = "") -> str:
    """Return the hash that DVC gives a file or folder. apart: name of a file to leave out."""
    if path.is_file():
        return md5(path.read_bytes()).hexdigest()
    files = [file for file in path.rglob("*") if file.is_file() and file.name != left_out]
    by_name = sorted((str(file.relative_to(path)), file) for file in files)
    listed = [{"md5": digest_of(file), "relpath": name} for name, file in by_name]
    return md5(json.dumps(listed, sort_keys=True).encode()).hexdigest() + ".dir"


def test_every_result_and_page_in_git_is_an_output_of_the_pipeline():
    present = [*ROOT.glob("results/mini/**/*.*"), *ROOT.glob("book/pages/*.ipynb")]
    names = [file.relative_to(ROOT) for file in present]
    outs = locked("outs")
    assert not [n for n in names if str(n) not in outs and str(n.parent) not in outs]


# Cheap stages with outputs in git, which DVC does not cache: they run again after a switch.
LIGHT = "prepare_data prepare_texts gather request headline claims artifact page book".split()
# Run records: their seconds may change, but no stage depends on them.
RUNS = "outputs/${suite}/run/"
HEAVY = [name for name in DEFINED if not name.startswith(tuple(LIGHT))]


@pytest.mark.parametrize("name", HEAVY)
def test_what_takes_time_writes_cached_outputs_and_depends_on_nothing_that_a_switch_changes(name):
    """Only on code and on files and settings of its suite, which a switch leaves as they were."""
    stage, code = DEFINED[name], ("featcal/", "reproduction/", "scripts/")
    # an output with flags, such as `cache`, would be a mapping
    assert all(str(out).startswith("outputs/${suite}/") for out in stage["outs"])
    items = pipeline.blocks()[name].get("foreach")
    deps = set(stage["deps"])
    for dep in [dep for dep in deps if dep.startswith("${item.")]:
        name = dep.removeprefix("${item.").rstrip("}")
        deps = deps - {dep} | {item[name] for item in items.values()}
    deps = [dep for dep in deps if not dep.startswith(code)]
    assert all(dep.startswith("outputs/${suite}/") for dep in deps), deps
    assert not any(dep.startswith(RUNS) for dep in deps), "a record of seconds would differ"
    for entry in stage.get("params", ()):
        if isinstance(entry, dict):  # `from`, all mergers and the main settings are for every suite
            assert set(entry) <= {"suites/${suite}.yaml", *MORE}
            keys = [key for file in MORE for key in entry.get(file, ())]
            shared = (".from", "merge.${key}")
            assert all(".${suite}" in key or key.endswith(shared) for key in keys), keys
        else:
            assert entry.partition(".")[0] in MAIN


@pytest.mark.parametrize("suite", sorted(file.stem for file in (ROOT / "suites").glob("*.yaml")))
def test_dvc_finds_every_setting_that_a_stage_names_whatever_the_suite(suite, tmp_path):
    """DVC fails at a missing key of params.yaml or of the suite's file; an unused role is null."""
    from dvc.dependency.param import MissingParamsError

    params = laid_out(tmp_path) / "params.yaml"
    params.write_text(re.sub("^suite: mini", f"suite: {suite}", params.read_text(), flags=re.M))
    missing = []
    with settings_of_stages(tmp_path) as dependencies:
        for _, dep in dependencies:
            try:
                dep.get_hash()
            except MissingParamsError as error:
                missing.append(str(error))
    assert dependencies and not missing
