"""Conditions under which DVC reuses models after a switch of the suite and back."""

import re

import pytest
from resolved import laid_out, settings_of_stages

import pipeline
from pipeline import ROOT
from reproduction.experiments import MAIN, MORE

# Cheap stages with outputs in git, which DVC does not cache: they run again after a switch.
LIGHT = tuple(
    "prepare_data prepare_texts gather request headline claims artifact page book".split()
)
# Run records: their seconds may change, but no stage depends on them.
RECORD = "outputs/${suite}/run/"
STAGES = pipeline.stages()
HEAVY = [name for name in STAGES if not name.startswith(LIGHT)]


@pytest.mark.parametrize("name", HEAVY)
def test_what_takes_time_writes_cached_outputs_and_depends_on_nothing_that_a_switch_changes(name):
    """Only on code and on files and settings of its suite, which a switch leaves as they were."""
    stage, code = STAGES[name], ("featcal/", "reproduction/", "scripts/")
    # an output with flags, such as `cache`, would be a mapping
    assert all(str(out).startswith("outputs/${suite}/") for out in stage["outs"])
    items = pipeline.blocks()[name].get("foreach")
    deps = set(stage["deps"])
    for dep in [dep for dep in deps if dep.startswith("${item.")]:
        deps = deps - {dep} | {
            own[dep.removeprefix("${item.").rstrip("}")] for own in items.values()
        }
    deps = [dep for dep in deps if not dep.startswith(code)]
    assert all(dep.startswith("outputs/${suite}/") for dep in deps), deps
    assert not any(dep.startswith(RECORD) for dep in deps), "a record of seconds would differ"
    for entry in stage.get("params", ()):
        if isinstance(entry, dict):  # `from`, all mergers and the main settings are for every suite
            assert set(entry) <= {"suites/${suite}.yaml", *MORE}
            words = [word for file in MORE for word in entry.get(file, ())]
            shared = (".from", "merge.${item}", "merge.${key}")
            assert all(".${suite}" in word or word.endswith(shared) for word in words), words
        else:
            assert entry.partition(".")[0] in MAIN


@pytest.mark.parametrize("suite", sorted(file.stem for file in (ROOT / "suites").glob("*.yaml")))
def test_dvc_finds_every_setting_that_a_stage_names_whatever_the_suite(suite, tmp_path):
    """DVC fails at a missing key of params.yaml or of the suite's file; an unused role is null."""
    from dvc.dependency.param import MissingParamsError

    params = laid_out(tmp_path) / "params.yaml"
    params.write_text(re.sub("^suite: mini", f"suite: {suite}", params.read_text(), flags=re.M))
    missing = []
    with settings_of_stages(tmp_path) as found:
        for _, dep in found:
            try:
                dep.get_hash()
            except MissingParamsError as error:
                missing.append(str(error))
    assert found and not missing
