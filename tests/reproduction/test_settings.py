"""Settings files: a mistake is one message that names the place and the way out."""

from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from smoke_graph import ROOT, lay_out, smoke_params, working_in

import pipeline
from featcal.errors import FeatCalError, MissingPath, UnknownKey
from reproduction.experiments import load_experiments, role_and_pool
from reproduction.prepare.suite import load_suite

KEY = "clip_b32-8"


def changed(tmp_path: Path, change) -> Path:
    """params.yaml of the smoke suite after `change` has had its way with it."""
    params = smoke_params()
    change(params)
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(params))
    return path


def test_a_missing_params_file_is_an_error_with_a_way_out(tmp_path):
    with pytest.raises(MissingPath, match="params.yaml"):
        load_experiments(tmp_path / "params.yaml")


@pytest.mark.parametrize("name", ["mini", "paper", "files"])
def test_every_suite_of_the_project_can_be_read(name):
    suite = load_suite(ROOT, name)
    assert suite.tasks_of("clip_b32", 8) and set(suite.roles) == {"clip_b32", "clip_l14"}


def test_a_stage_with_an_unknown_key_names_the_nearest_one(tmp_path):
    from reproduction.stages.command import run_stage

    lay_out(tmp_path)
    with working_in(tmp_path), pytest.raises(UnknownKey, match="did you mean 'clip_b32-8'"):
        run_stage("calibrate", "clip_b32-9")
    with working_in(tmp_path), pytest.raises(FeatCalError, match="did you mean 'calibrate'"):
        run_stage("calibrat", "x")


def test_the_mini_suite_in_force_is_the_one_that_was_chosen():
    import json

    choice = json.loads((ROOT / "reproduction/mini/choice.json").read_text())
    suite, params = load_suite(ROOT, "mini"), pipeline.settings()
    assert suite.data.strength == choice["chosen"]["strength"]
    for key, mergers in params["merge"].items():
        role, pool = role_and_pool(key)
        if role in suite.roles:
            scale = choice["chosen"]["scale"][role][str(pool)]
            assert mergers["task_arithmetic"]["mini"]["scale"] == scale, key
            assert mergers["adamerging"]["mini"].get("start", scale) == scale, key
    for key, run in load_experiments(ROOT / "params.yaml", "mini").calibrate.items():
        if run.setting == "suite" and run.calibration and run.role in suite.roles:
            assert choice["chosen"]["settings"].items() <= run.calibration.model_dump().items(), key


def test_what_differs_at_one_merged_model_is_told_under_from(tmp_path):
    """Settings of a group hold for every merged model; a row changes some, leaves a setting out, or
    adds one of its own.
    """

    def change(p):
        entry = p["calibrate"][KEY]
        entry["smoke"]["paper"], printed = None, entry["smoke"]["paper"]
        entry["from"] = {
            "average": {"suite": {"samples": 5}, "paper": {"samples": 7}}, "ties": {"suite": None}, "lot": None, "wudi": {},
        }  # fmt: skip
        p["calibrate"]["clip_l14-8"]["smoke"] = {
            "suite": p["calibrate"]["clip_l14-8"]["smoke"]["suite"]
        }
        p["calibrate"]["clip_l14-8"]["from"] = {"wudi": {"paper": printed}, "average": {}}
        p["measure"] = {}

    runs = load_experiments(changed(tmp_path, change)).calibrate
    samples = {
        key: run.samples
        for key, run in runs.items()
        if run.calibration and run.pool == 8 and run.role != "minilm"
    }
    assert samples == {
        "clip_b32-8-average-suite": 5, "clip_b32-8-wudi-suite": 16,
        "clip_l14-8-wudi-suite": 16, "clip_l14-8-wudi-paper": 16, "clip_l14-8-average-suite": 16,
    }  # fmt: skip
