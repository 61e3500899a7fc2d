"""What a student may mistype in params.yaml and suites/*.yaml: one message that names the place,
before any stage begins.
"""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from smoke_graph import ROOT, smoke_params

from featcal.cli import main as cli
from featcal.errors import FeatCalError
from pipeline import write_settings
from reproduction import experiments
from reproduction.engine.context import load_context

POOL, LARGER = "clip_b32-8", "clip_b32-14"
CALIBRATE, MERGE, ADAPT, ABLATE = (
    f"calibrate/{POOL}",
    f"merge/{POOL}",
    f"adapt/{POOL}",
    f"ablate/{POOL}",
)
PARAMS, SUITE = smoke_params(), yaml.safe_load((ROOT / "tests/smoke/smoke.yaml").read_text())


def project(folder: Path, params: Any, suite: Any) -> Path:
    """A folder with nothing but settings."""
    shutil.copytree(ROOT / "suites", folder / "suites")
    (folder / "suites/smoke.yaml").write_text(yaml.safe_dump(suite))
    write_settings(folder, params)
    return folder


def put(tree: Any, path: str, value: Any) -> Any:
    """The tree with another value at a path such as `merge/name/smoke/scale`; 8 stands for the
    number.
    """
    tree = copy.deepcopy(tree)
    *way, last = [int(word) if word.isdigit() else word for word in path.split("/")]
    inner = tree
    for word in way:
        inner = inner[word]
    if value is DROPPED:
        del inner[last]
    else:
        inner[last] = value
    return tree


DROPPED: Any = object()
IN_PARAMS: list[tuple[str, Any, str]] = [
    ("suite", "smke", "did you mean 'smoke'"),
    ("calibrte", {}, "did you mean 'calibrate'"),
    (
        "calibrate/clip_b23-8",
        {},
        "calibrate: 'clip_b23-8' is not known here; did you mean 'clip_b32-8'",
    ),
    (f"{CALIBRATE}/smoke", DROPPED, "no settings for the suite 'smoke'"),
    (f"{CALIBRATE}/from", DROPPED, "lacks from"),
    (
        f"{CALIBRATE}/from/averge",
        {},
        "calibrate.clip_b32-8.from: 'averge' is not known here; did you mean 'average'",
    ),
    (
        f"{CALIBRATE}/from/average",
        {"suite": {"ridge": 0}},
        "calibrate.clip_b32-8.from.average.suite.ridge: 0",
    ),
    ("featcal/clip_b32/suite/ridge", DROPPED, "lacks ridge"),
    (
        f"{CALIBRATE}/smoke/suite/samples",
        True,
        "suite.samples: True cannot be used; it must be a valid integer",
    ),
    (f"{CALIBRATE}/smoke/suite/seeds", [42, 42], "must name each value once"),
    (
        f"{MERGE}/averge",
        {"smoke": {}},
        "merge.clip_b32-8.averge: 'averge' is not known here; did you mean 'average'",
    ),
    (f"{MERGE}/task_arithmetic/smoke", {"sclae": 0.3}, "did you mean 'scale'"),
    (
        f"{MERGE}/task_arithmetic/smoke/scale",
        "0.3x",
        "merge.clip_b32-8.task_arithmetic.smoke.scale",
    ),
    (f"{MERGE}/wudi_closed_form/smoke", {"method": "wdi"}, "must be the same in every suite"),
    (f"{MERGE}/regmean/smoke/stream", "test", "merge.clip_b32-8.regmean.smoke.stream: 'test'"),
    (
        f"{ADAPT}/smoke/surgry",
        {},
        "adapt.clip_b32-8.smoke: 'surgry' is not known here; did you mean 'surgery'",
    ),
    (f"{ADAPT}/smoke/surgery/suite/rank", 0, "surgery.suite.rank: 0"),
    (f"{ABLATE}/smoke/without/without_bias", {"bais": False}, "did you mean 'bias'"),
    (f"{ABLATE}/smoke/rescale/split", "test", "must be 'validation' or 'train'"),
    ("merge/clip_b32-20/average/smoke", {}, "not among the pools of suites/smoke.yaml"),
    ("multitask/clip_b32-8/smoke/steps", 0, "multitask.clip_b32-8.smoke.steps: 0"),
    ("multitask/clip_b32-8/smoke", {}, "either steps"),
    ("measure/clip_b32-8/smoke/upstream", "averag", "clip_b32-8-averag"),
    ("measure/clip_b32-8/smoke/task", "dtdd", "did you mean 'dtd'"),
    (
        "corrupted/clip_b32-8/smoke/corruptions",
        ["snow"],
        "'gaussian_noise', 'motion_blur' or 'fog'",
    ),
    ("corrupted/clip_b32-8/smoke/severity", 5, "corrupted.clip_b32-8.smoke.severity"),
    (
        "sweep/clip_b32-8/smoke/around/0/interpolation",
        [0.9, 1.5],
        "interpolation: 1.5",
    ),
    ("task_counts/clip_b32-8/smoke/counts", [2, 2], "must name each value once"),
    ("studied/clip_b32-8/smoke/rivals/setting", "paper", "must be left out"),
    ("featcal/clip_b32/paper", DROPPED, "lacks ridge"),
]
IN_SUITE: list[tuple[str, Any, str]] = [
    ("worker", 2, "did you mean 'workers'"),
    *[("pools", value, "pools") for value in (None, {"eight": ["mnist"]}, {8: [1]})],
    ("pools", {8: ["mnist", "mnist"]}, "must name each value once"),
    ("pools", {8: ["mnist", "dtd"], 14: ["mnist", "svhn", "gtsrb"]}, "largest pool"),
    ("roles/clip_b32/experts", "somewhere", "{task}"),
    ("fine_tune", {"stps": 1.0}, "did you mean 'steps'"),
    ("fine_tune", {"steps": True}, "fine_tune.steps"),
    ("device", "gpu", "device"),
    ("expert_steps", {"mnst": 5}, "did you mean 'mnist'"),
    ("data/train", 0, "data.train"),
]


def message(folder: Path) -> str:
    """What the settings are refused with."""
    with pytest.raises(FeatCalError) as refused:
        load_context(folder)
    assert len(str(refused.value)) < 600
    return str(refused.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A project whose suite each test writes for itself."""
    return project(tmp_path_factory.mktemp("project"), PARAMS, SUITE)


@pytest.fixture(autouse=True)
def without_mistakes(folder):
    yield
    (folder / "suites/smoke.yaml").write_text(yaml.safe_dump(SUITE))


def test_the_settings_the_mistakes_are_made_in_are_fine_themselves(tmp_path):
    assert load_context(project(tmp_path, PARAMS, SUITE)).suite.name == "smoke"


@pytest.mark.parametrize(("path", "value", "said"), IN_PARAMS)
def test_a_mistake_in_params_is_named_with_its_place(folder, monkeypatch, path, value, said):
    """As if the mistake had been read from the file, whose whole text would be written and parsed
    anew for each.
    """
    monkeypatch.setattr(experiments, "read_all", lambda _: put(PARAMS, path, value))
    assert said in message(folder)


@pytest.mark.parametrize(("path", "value", "said"), IN_SUITE)
def test_a_mistake_in_a_suite_is_named_with_its_place(folder, path, value, said):
    (folder / "suites/smoke.yaml").write_text(yaml.safe_dump(put(SUITE, path, value)))
    assert said in message(folder)


@pytest.mark.parametrize("text", ["suite: [mini", "- a\n", "", "suite: \xff"])
@pytest.mark.parametrize("name", ["params.yaml", "suites/smoke.yaml"])
def test_a_settings_file_that_is_no_yaml_mapping_is_named(tmp_path, name, text):
    (project(tmp_path, PARAMS, SUITE) / name).write_bytes(text.encode("latin-1"))
    assert name in message(tmp_path)


@pytest.mark.parametrize("verb", ["prepare", "evaluate"])
def test_a_stage_of_a_role_that_no_experiment_has_is_refused_and_writes_nothing(
    tmp_path, monkeypatch, capsys, verb
):
    monkeypatch.chdir(project(tmp_path, PARAMS, SUITE))
    assert cli.main(["stage", verb, "clip_b23-8"]) == cli.MISTAKE
    assert (
        "did you mean 'clip_b32'" in capsys.readouterr().err and not (tmp_path / "outputs").exists()
    )
