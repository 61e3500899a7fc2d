"""Settings are as chosen, and every mistake in them is one message that names its place."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from smoke_graph import smoke_params

from featcal.cli import main as cli
from featcal.errors import FeatCalError
from featcal.settings import Calibration
from pipeline import ROOT, settings, write_settings
from reproduction import experiments
from reproduction.engine.context import load_context
from reproduction.experiments import ADAPTERS, STREAMS, Reading, load_experiments, study_run
from reproduction.prepare.suite import load_suite

POOL = "clip_b32-8"
CALIBRATE, MERGE, ADAPT, ABLATE = (f"{s}/{POOL}" for s in ("calibrate", "merge", "adapt", "ablate"))
CHOICES, DEFAULT = "choices/flan_t5_base-glue/smoke", f"default/{POOL}/smoke"
PARAMS, SUITE = smoke_params(), yaml.safe_load((ROOT / "tests/smoke/smoke.yaml").read_text())


def project(folder: Path, params: Any, suite: Any) -> Path:
    """Return a folder with nothing but settings."""
    shutil.copytree(ROOT / "suites", folder / "suites")
    (folder / "suites/smoke.yaml").write_text(yaml.safe_dump(suite))
    write_settings(folder, params)
    return folder


def put(tree: Any, path: str, value: Any) -> Any:
    """Return the tree with another value at a path such as `merge/name/smoke/scale`."""
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
    ("calibrate/clip_b23-8", {}, "calibrate: 'clip_b23-8' is not known here; did you mean 'clip_b32-8'"),
    (f"{CALIBRATE}/smoke", DROPPED, "no settings for the suite 'smoke'"),
    (f"{CALIBRATE}/from", DROPPED, "lacks from"),
    (f"{CALIBRATE}/from/averge", {}, "calibrate.clip_b32-8.from: 'averge' is not known here; did you mean 'average'"),
    (f"{CALIBRATE}/from/average", {"suite": {"ridge": 0}}, "calibrate.clip_b32-8.from.average.suite.ridge: 0"),
    (f"{CALIBRATE}/from/average", {"suite": {"affine": "joint", "bias": False}}, "from.average.suite.affine: 'joint'"),
    (f"{CALIBRATE}/from/average", {"suite": {"nrom": 1}}, "from.average.suite: 'nrom'"),
    ("featcal/clip_b32/suite/ridge", DROPPED, "lacks ridge"),
    (f"{CALIBRATE}/smoke/suite/samples", True, "suite.samples: True cannot be used; it must be a valid integer"),
    (f"{CALIBRATE}/smoke/suite/seeds", [42, 42], "must name each value once"),
    (f"{MERGE}/averge", {"smoke": {}}, "merge.clip_b32-8.averge: 'averge' is not known here; did you mean 'average'"),
    (f"{MERGE}/task_arithmetic/smoke", {"sclae": 0.3}, "did you mean 'scale'"),
    (f"{MERGE}/task_arithmetic/smoke/scale", "0.3x", "merge.clip_b32-8.task_arithmetic.smoke.scale"),
    (f"{MERGE}/wudi_closed_form/smoke", {"method": "wdi"}, "must be the same in every suite"),
    (f"{MERGE}/regmean/smoke/stream", "test", "merge.clip_b32-8.regmean.smoke.stream: 'test'"),
    (f"{ADAPT}/smoke/surgry", {}, "adapt.clip_b32-8.smoke: 'surgry' is not known here; did you mean 'surgery'"),
    (f"{ABLATE}/smoke/without/without_bias", {"bais": False}, "did you mean 'bias'"),
    ("merge/clip_b32-20/average/smoke", {}, "not among the pools of suites/smoke.yaml"),
    ("multitask/clip_b32-8/smoke", {}, "either steps"),
    ("measure/clip_b32-8/smoke/upstream", "averag", "clip_b32-8-averag"),
    ("measure/clip_b32-8/smoke/task", "dtdd", "did you mean 'dtd'"),
    ("corrupted/clip_b32-8/smoke/corruptions", ["snow"], "'gaussian_noise', 'motion_blur' or 'fog'"),
    ("sweep/clip_b32-8/smoke/around/0/interpolation", [0.9, 1.5], "sweep.clip_b32-8.smoke.around.0.calibrate.interpolation: 1.5"),
    ("studied/clip_b32-8/smoke/comparison/setting", "paper", "must be left out"),
    (f"{CHOICES}/setting", "ours", "choices.flan_t5_base-glue.smoke.setting"),
    (f"{CHOICES}/vary", {"decodr": ["start"]}, "must be 'split', 'decoder'"),
    (f"{CHOICES}/vary", {"decoder": ["answer"]}, "is the default itself"),
    (f"{CHOICES}/vary", {"counted": ["prompt"]}, "of the pool mergebench alone"),
    (f"{CHOICES}/vary", {"modules": {"none": []}}, "at least 1 item"),
    (f"{CHOICES}/vary", {"modules": {}}, "at least 1 item"),
    (f"{DEFAULT}/mergers", {"regmean": {}}, "must be a merger that looks at no data"),
    (f"{DEFAULT}/mergers", {"average": {"scale": 1.0}}, "default.mergers.average"),
    (f"{DEFAULT}/draws", [[32, 42], [32, 42]], "default.clip_b32-8.smoke.draws"),
]  # fmt: skip
IN_SUITE: list[tuple[str, Any, str]] = [
    ("worker", 2, "did you mean 'workers'"),
    *[("pools", value, "pools") for value in (None, {"eight": ["mnist"]}, {8: [1]})],
    ("pools", {8: ["mnist", "mnist"]}, "must name each value once"),
    ("pools", {8: ["mnist", "dtd"], 14: ["mnist", "svhn", "gtsrb"]}, "largest pool"),
    ("roles/clip_b32/experts", "somewhere", "{task}"),
    ("fine_tune", {"stps": 1.0}, "did you mean 'steps'"),
    ("device", "gpu", "device"),
    ("expert_steps", {"mnst": 5}, "did you mean 'mnist'"),
]


def message(folder: Path) -> str:
    """Return what the settings are refused with."""
    with pytest.raises(FeatCalError) as refused:
        load_context(folder)
    assert len(str(refused.value)) < 600
    return str(refused.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Give a project in which some tests write the suite anew."""
    return project(tmp_path_factory.mktemp("project"), PARAMS, SUITE)


def test_the_settings_the_mistakes_are_made_in_are_fine_themselves(folder):
    assert load_context(folder).suite.name == "smoke"


@pytest.mark.parametrize(("path", "value", "said"), IN_PARAMS)
def test_a_mistake_in_params_is_named_with_its_place(folder, monkeypatch, path, value, said):
    """Without writing and parsing the whole text for each."""
    monkeypatch.setattr(experiments, "read_all", lambda _: put(PARAMS, path, value))
    assert said in message(folder)


@pytest.mark.parametrize(("path", "value", "said"), IN_SUITE)
def test_a_mistake_in_a_suite_is_named_with_its_place(folder, path, value, said):
    file = folder / "suites/smoke.yaml"
    file.write_text(yaml.safe_dump(put(SUITE, path, value)))
    refusal = message(folder)
    file.write_text(yaml.safe_dump(SUITE))
    assert said in refusal


@pytest.mark.parametrize("text", ["suite: [mini", "- a\n", "", "suite: \xff"])
@pytest.mark.parametrize("name", ["params.yaml", "suites/smoke.yaml"])
def test_a_settings_file_that_is_no_yaml_mapping_or_missing_is_named(tmp_path, name, text):
    file = project(tmp_path, PARAMS, SUITE) / name
    file.write_bytes(text.encode("latin-1"))
    assert name in message(tmp_path)
    file.unlink()
    assert Path(name).stem in message(tmp_path)


@pytest.mark.parametrize(
    ("verb", "key", "said"),
    [
        ("prepare", "clip_b23-8", "did you mean 'clip_b32'"),
        ("evaluate", "clip_b23-8", "did you mean 'clip_b32'"),
        ("calibrate", "clip_b32-9", "did you mean 'clip_b32-8'"),
        ("calibrat", "x", "did you mean 'calibrate'"),
    ],
)
def test_a_stage_without_an_experiment_is_refused(folder, monkeypatch, capsys, verb, key, said):
    monkeypatch.chdir(folder)
    assert cli.main(["stage", verb, key]) == cli.MISTAKE
    assert said in capsys.readouterr().err and not (folder / "outputs").exists()


@pytest.mark.parametrize(
    ("method", "stream"), [(m, s) for m, s in STREAMS.items() if m in PARAMS["merge"][POOL]]
)
def test_a_method_looks_at_the_samples_of_its_source(tmp_path, monkeypatch, method, stream):
    entry = {"smoke": {"samples": 16, "batch": 8}, "mini": None}
    monkeypatch.setattr(experiments, "read_all", lambda _: put(PARAMS, f"{MERGE}/{method}", entry))
    draw = load_experiments(tmp_path / "params.yaml").merge[f"{POOL}-{method}"].draw
    assert draw is not None and (draw.stream, draw.samples, draw.batch) == (stream, 16, 8)


PAPERS = set("average task_arithmetic ties wudi regmean regmean_plus_plus lot adamerging".split())


@pytest.mark.parametrize("name", ["mini", "paper", "files"])
def test_every_setting_is_valid_in_every_suite_and_every_suite_can_be_read(tmp_path, name):
    suite = load_suite(ROOT, name)
    assert suite.tasks_of("clip_b32", 8) and set(suite.roles) == {"clip_b32", "clip_l14"}
    write_settings(tmp_path, settings() | {"suite": name})
    loaded = load_experiments(tmp_path / "params.yaml")
    for role in ("clip_b32", "clip_l14"):
        assert {run.method for run in loaded.merged_in(role, 8).values()} == PAPERS
        adapted = {(run.upstream, run.method) for run in loaded.adapted_in(role, 8).values()}
        mergers = ("average", "task_arithmetic", "adamerging", "wudi", "wudi_closed_form")
        assert adapted == {(upstream, method) for upstream in mergers for method in ADAPTERS}


def test_the_mini_suite_in_force_is_the_one_that_was_chosen():
    choice = json.loads((ROOT / "reproduction/mini/choice.json").read_text())["chosen"]
    wudi = json.loads((ROOT / "reproduction/mini/wudi_rate.json").read_text())
    for rate in wudi.values():
        assert rate["chosen"] == float(min(rate["losses"], key=rate["losses"].__getitem__))
    suite, params = load_suite(ROOT, "mini"), settings()
    assert suite.data.strength == choice["strength"]
    for key, mergers in params["merge"].items():
        role, pool = experiments.role_and_pool(key)
        if role in suite.roles:
            scale = choice["scale"][role][str(pool)]
            assert mergers["task_arithmetic"]["mini"]["scale"] == scale, key
            assert mergers["adamerging"]["mini"].get("start", scale) == scale, key
            assert mergers["wudi"]["mini"]["rate"] == wudi["clip_b32"]["chosen"], key
    assert params["merge"]["vit_s-8"]["wudi"]["mini"]["rate"] == wudi["vit_s"]["chosen"]
    for key, run in load_experiments(ROOT / "params.yaml", "mini").calibrate.items():
        if run.setting == "suite" and run.role in suite.roles:
            assert choice["settings"].items() <= run.calibration.model_dump().items(), key


def test_what_differs_at_one_merged_model_is_a_row_under_from(tmp_path, monkeypatch):
    """A row changes settings of its group, leaves one out, or adds one of its own."""
    params = copy.deepcopy(PARAMS)
    entry, larger = params["calibrate"][POOL], params["calibrate"]["clip_l14-8"]
    entry["smoke"]["paper"], printed = None, entry["smoke"]["paper"]
    rows = {"average": {"suite": {"samples": 5}, "paper": {"samples": 7}}}
    entry["from"] = rows | {"ties": {"suite": None}, "lot": None, "wudi": {}}
    larger["smoke"] = {"suite": larger["smoke"]["suite"]}
    larger["from"] = {"wudi": {"paper": printed}, "average": {}}
    params["measure"] = {}
    monkeypatch.setattr(experiments, "read_all", lambda _: params)
    runs = load_experiments(tmp_path / "params.yaml").calibrate
    samples = {k: run.samples for k, run in runs.items() if k.startswith("clip") and run.pool == 8}
    assert samples == {
        "clip_b32-8-average-suite": 5, "clip_b32-8-wudi-suite": 16,
        "clip_l14-8-wudi-suite": 16, "clip_l14-8-wudi-paper": 16, "clip_l14-8-average-suite": 16,
    }  # fmt: skip


GIVEN = {
    "upstream": "task_arithmetic",
    "setting": "paper",
    "featcal": {"ridge": 1e-5, "anchor_blend": 2.0, "interpolation": 0.6},
    "reading": {},
    "samples": 256,
    "batch": 32,
    "seeds": [42, 43, 44],
    "vary": {
        "decoder": ["start"],
        "tokens": [12],
        "modules": {"attention": ["q", "v"]},
        "samples": [64],
    },
}


def test_every_option_changes_one_thing_and_the_default_is_made_at_every_seed():
    default, *models = study_run("choices", "flan_t5_base-glue", {"mini": GIVEN}, "mini").models()
    assert [model.seed for model in models] == [43, 44, 42, 42, 42, 42]
    assert default.settings == Calibration(**GIVEN["featcal"]) and default.reading == Reading()
    assert (default.upstream, default.setting) == ("task_arithmetic", "paper")
    assert default.draw == experiments.SampleDraw(stream="train", samples=256, batch=32, seed=42)
    changes = {
        "decoder-start": {"reading": Reading(decoder="start")},
        "tokens-12": {"reading": Reading(tokens=12)},
        "modules-attention": {"settings": default.settings.but(modules=("q", "v"))},
        "samples-64": {"draw": default.draw.but(samples=64)},
    }
    assert [model.name for model in models[2:]] == list(changes)
    for model in models[2:]:
        fields = {name: getattr(model, name) for name in ("name", "folder", "columns")}
        assert model == default.but(**fields, **changes[model.name])
        assert model.columns["choice"] + "-" + model.columns["option"] == model.name


def test_a_sweep_tries_the_setting_s_own_value_too_and_a_model_on_two_curves_once():
    around = {"setting": "paper", "featcal": GIVEN["featcal"], "ridge": [1], "anchor_blend": [2, 4]}
    entry = {"upstreams": ["wudi"], "samples": 8, "batch": 8, "seed": 1, "around": [around]}
    points = study_run("sweep", POOL, {"mini": entry}, "mini").around[0].points().values()
    points = [[(row["parameter"], row["at"], row["chosen"]) for row in rows] for rows in points]
    own = [("ridge", "1e-05", 1), ("anchor_blend", "2", 1)]
    assert points == [own, [("ridge", "1", 0)], [("anchor_blend", "4", 0)]]
