"""What a student may mistype in params.yaml and suites/*.yaml: one message that names the place, before any stage begins."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from smoke_graph import ROOT, smoke_params

from featcal import cli
from featcal.errors import FeatCalError
from featcal.stages.context import load_context

CALIBRATE, MERGE, MEASURE = "clip_b32-8-task_arithmetic-suite", "clip_b32-8-task_arithmetic", "clip_b32-8"
LARGER = "clip_b32-14"
ADAPT, ABLATE, DATA = "clip_b32-8-task_arithmetic-surgery", "clip_b32-8-task_arithmetic", "clip_b32-8-regmean"
PARAMS, SUITE = smoke_params(), yaml.safe_load((ROOT / "tests/smoke/smoke.yaml").read_text())


def project(folder: Path, params: Any, suite: Any) -> Path:
    """A folder with nothing but settings."""
    shutil.copytree(ROOT / "suites", folder / "suites")
    (folder / "suites/smoke.yaml").write_text(yaml.safe_dump(suite))
    (folder / "params.yaml").write_text(yaml.safe_dump(params))
    return folder


def put(tree: Any, path: str, value: Any) -> Any:
    """The tree with another value at a path such as `merge/name/smoke/scale`; 8 stands for the number."""
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
    ("suite", ["smoke"], "suite"),
    ("calibrte", {}, "did you mean 'calibrate'"),
    ("merge", None, "merge"),
    ("prepare/clip_b32-8/rolle", "clip_b32", "prepare.clip_b32-8"),
    ("prepare/clip_b32-8/role", "clip_l14", "prepare.clip_b32-8"),
    *[(f"calibrate/{CALIBRATE}/{word}", DROPPED, f"lacks {word}") for word in ("role", "pool", "upstream", "setting")],
    (f"calibrate/{CALIBRATE}/role", ["clip_b32"], f"calibrate.{CALIBRATE}.role"),
    (f"calibrate/{CALIBRATE}/role", "clip_l14", f"calibrate.{CALIBRATE}: 'clip_l14-8-task_arithmetic-suite'"),
    (f"calibrate/{CALIBRATE}/pool", "8", f"calibrate.{CALIBRATE}.pool: '8'"),
    (f"calibrate/{CALIBRATE}/setting", ["suite"], f"calibrate.{CALIBRATE}.setting"),
    (f"calibrate/{CALIBRATE}/rolle", "x", f"calibrate.{CALIBRATE}.rolle"),
    (f"calibrate/{CALIBRATE}/smoke", DROPPED, "no settings for the suite 'smoke'"),
    (f"calibrate/{CALIBRATE}/smoke/ridge", [1], f"calibrate.{CALIBRATE}.smoke.ridge: [1]"),
    (f"calibrate/{CALIBRATE}/smoke/ridge", DROPPED, "lacks ridge"),
    (f"calibrate/{CALIBRATE}/smoke/samples", True, "smoke.samples: True cannot be used; it must be a whole number"),
    (f"calibrate/{CALIBRATE}/smoke/seeds", [-1], "smoke.seeds: -1"),
    (f"calibrate/{CALIBRATE}/smoke/seeds", [42, 42], "each seed once"),
    (f"calibrate/{CALIBRATE}/smoke/order", ["forward"], "smoke.order"),
    (f"merge/{MERGE}/method", ["average"], f"merge.{MERGE}.method"),
    (f"merge/{MERGE}/pool", "8", f"merge.{MERGE}.pool"),
    (f"merge/{MERGE}/smoke", {"sclae": 0.3}, "did you mean 'scale'"),
    (f"merge/{MERGE}/smoke", {"out": "x"}, "'out' is not known"),
    (f"merge/{MERGE}/smoke/scale", "0.3x", f"merge.{MERGE}.smoke.scale"),
    (f"merge/{DATA}", {"role": "clip_b32", "pool": 8, "method": "regmean", "smoke": {}}, "belongs to merge_with_data"),
    (f"merge_with_data/{MERGE}", PARAMS["merge"][MERGE], "belongs to merge:"),
    (f"merge_with_data/{DATA}/smoke/stream", "test", f"merge_with_data.{DATA}.smoke.stream: 'test'"),
    (f"merge_with_data/{DATA}/smoke/samples", 0, f"merge_with_data.{DATA}.smoke.samples: 0"),
    (f"merge_with_data/{DATA}/smoke/batch", DROPPED, "lacks batch"),
    (f"merge_with_data/{DATA}/smoke/of_diagonal", 1, "did you mean 'off_diagonal'"),
    (f"adapt/{ADAPT}/upstream", "lot", "'clip_b32-8-lot-surgery'"),
    (f"adapt/{ADAPT}/method", "surgry", "clip_b32-8-task_arithmetic-surgry"),
    (f"adapt/{ADAPT}/smoke/large", {}, "must hold suite, paper, suite_train, paper_train"),
    (f"adapt/{ADAPT}/smoke/suite/rank", 0, f"adapt.{ADAPT}.smoke.suite.rank: 0"),
    (f"adapt/{ADAPT}/smoke/suite/hidden", 8, f"adapt.{ADAPT}.smoke.suite: 'hidden'"),
    (f"adapt/{ADAPT}/smoke/suite/seeds", [], f"adapt.{ADAPT}.smoke.suite.seeds"),
    (f"adapt/{ADAPT}/smoke/suite/samples", DROPPED, "lacks samples"),
    (f"adapt/{ADAPT}/smoke/suite/stream", "train", f"adapt.{ADAPT}.smoke.suite.stream: 'train'"),
    (f"ablate/{ABLATE}/smoke/without", DROPPED, "must hold a mapping called without"),
    (f"ablate/{ABLATE}/smoke/without/without_bias", {"bais": False}, "did you mean 'bias'"),
    (f"ablate/{ABLATE}/smoke/without/without_bias", {}, "without_bias"),
    (f"ablate/{ABLATE}/smoke/rescale/split", "test", "never test"),
    (f"ablate/{ABLATE}/smoke/rescale/factors", [], "factors"),
    (f"ablate/{ABLATE}/smoke/ridge", 0, f"ablate.{ABLATE}.smoke.ridge: 0"),
    (f"larger_pools/{LARGER}", None, f"larger_pools.{LARGER}"),
    (f"larger_pools/{LARGER}/role", "clip_l14", f"larger_pools.{LARGER}: 'clip_l14-14'"),
    (f"larger_pools/{LARGER}/pool", DROPPED, "lacks pool"),
    (f"larger_pools/{LARGER}/surgry", {}, "did you mean 'surgery'"),
    (f"larger_pools/{LARGER}/surgery", DROPPED, f"larger_pools.{LARGER}.surgery"),
    (f"larger_pools/{LARGER}/mergers/smoke", DROPPED, "no settings for the suite 'smoke'"),
    (f"larger_pools/{LARGER}/mergers/smoke/averge", {}, "did you mean 'average'"),
    (f"larger_pools/{LARGER}/mergers/smoke/average", None, f"larger_pools.{LARGER}.mergers.smoke.average"),
    (f"larger_pools/{LARGER}/mergers/smoke/wudi/step", 2, "did you mean 'steps'"),
    (f"larger_pools/{LARGER}/mergers/smoke/adamerging/batch", 0, f"larger_pools.{LARGER}.mergers.smoke.adamerging.batch: 0"),
    (f"larger_pools/{LARGER}/featcal/smoke/siute", {}, "did you mean 'suite'"),
    (f"larger_pools/{LARGER}/featcal/smoke/suite/ridge", 0, f"larger_pools.{LARGER}.featcal.smoke.suite.ridge: 0"),
    (f"larger_pools/{LARGER}/prob_surgery/smoke/suite/rank", 4, f"larger_pools.{LARGER}.prob_surgery.smoke.suite: 'rank'"),
    ("larger_pools/clip_b32-20/mergers/smoke", {"average": {}}, "not among the pools of suites/smoke.yaml"),
    ("multitask/clip_b32-8/smoke/steps", 0, "multitask.clip_b32-8.smoke.steps: 0"),
    ("multitask/clip_b32-8/smoke/stps", 5, "did you mean 'steps'"),
    ("multitask/clip_b32-8/smoke", {}, "either steps"),
    ("multitask/clip_b32-8/smoke/model", "someone/model", "either steps"),
    (f"measure/{MEASURE}/smoke/upstream", "averag", "clip_b32-8-averag"),
    (f"measure/{MEASURE}/smoke/settings", "suite", "settings: 'suite'"),
    (f"measure/{MEASURE}/smoke/settings", 5, "settings: 5"),
    (f"measure/{MEASURE}/smoke/settings", [["suite"]], "settings"),
    (f"measure/{MEASURE}/smoke/seed", 7, "seed: 7"),
    (f"measure/{MEASURE}/smoke/task", "dtdd", "did you mean 'dtd'"),
    (f"measure/{MEASURE}/smoke/task", ["dtd"], "task"),
    ("corrupted/clip_b32-8/smoke/corruptions", ["snow"], "gaussian_noise, motion_blur, fog"),
    ("corrupted/clip_b32-8/smoke/severity", 5, "corrupted.clip_b32-8.smoke.severity"),
    ("corrupted/clip_b32-8/smoke/rivals/surgery/rnk", 2, "did you mean 'rank'"),
    ("sweep/clip_b32-8/smoke/around/0/ridge", [1.0], "must hold 1e-06"),
    ("sweep/clip_b32-8/smoke/around/0/interpolation", [0.9, 1.5], "must lie in [0, 1]"),
    ("sweep/clip_b32-8/smoke/around/0/rigde", [1.0e-6], "did you mean 'ridge'"),
    ("sweep/clip_b32-8/smoke/around", [], "must name each setting once"),
    ("sweep/clip_b32-8/smoke/upstreams", ["wdi"], "must be one of the merged models"),
    ("task_counts/clip_b32-8/smoke/counts", [2, 2], "must name each number once"),
    ("task_counts/clip_b32-8/smoke/shuffles", 0, "task_counts.clip_b32-8.smoke.shuffles: 0"),
    ("task_counts/clip_b32-8/smoke/upstreams", ["wdi"], "must be one of the merged models"),
    ("task_counts/clip_b32-8/smoke/rivals/setting", "paper", "must be left out"),
]
IN_SUITE: list[tuple[str, Any, str]] = [
    ("worker", 2, "did you mean 'workers'"),
    ("heads", DROPPED, "lacks heads"),
    *[("pools", value, "pools") for value in (None, [1], {}, {"eight": ["mnist"]}, {8: "mnist"}, {8: []}, {8: [1]})],
    ("pools", {8: ["mnist", "mnist"]}, "each named once"),
    ("pools", {8: ["mnst"]}, "did you mean 'mnist'"),
    ("pools", {8: ["mnist", "dtd"], 14: ["mnist", "svhn", "gtsrb"]}, "largest pool"),
    ("roles", "x", "roles"),
    ("roles", {"clip_b23": {"clip": "x"}}, "did you mean 'clip_b32'"),
    ("roles/clip_b32", {"clp": "x"}, "did you mean 'clip'"),
    ("roles/clip_b32/clip", 5, "roles.clip_b32.clip"),
    ("roles/clip_b32/experts", "somewhere", "{task}"),
    ("fine_tune", [1], "fine_tune"),
    ("fine_tune", {"stps": 1.0}, "did you mean 'steps'"),
    ("fine_tune", {"steps": True}, "fine_tune.steps"),
    ("fine_tune", {"momentum": "x"}, "fine_tune.momentum"),
    ("fine_tune", {"frozen": "embeddings"}, "fine_tune.frozen"),
    ("heads", ["prompts"], "heads"),
    ("device", "gpu", "device"),
    ("workers", "2", "workers"),
    ("workers", -1, "workers"),
    ("expert_seed", "x", "expert_seed"),
    ("expert_steps", {"mnst": 5}, "did you mean 'mnist'"),
    ("expert_steps", {"mnist": "x"}, "expert_steps.mnist"),
    ("data", None, "data"),
    ("data", {"source": "mini"}, "data.train"),
    ("data/source", ["mini"], "data.source"),
    ("data/train", 0, "data.train"),
    ("data/test", [5], "data.test"),
    ("data/seed", -1, "data.seed"),
    ("data/strength", None, "data.strength"),
    ("data/srength", 0.5, "did you mean 'strength'"),
]


def message(folder: Path) -> str:
    """What the settings are refused with."""
    with pytest.raises(FeatCalError) as refused:
        load_context(folder)
    assert len(str(refused.value)) < 600
    return str(refused.value)


def test_the_settings_the_mistakes_are_made_in_are_fine_themselves(tmp_path):
    assert load_context(project(tmp_path, PARAMS, SUITE)).suite.name == "smoke"


@pytest.mark.parametrize(("path", "value", "said"), IN_PARAMS)
def test_a_mistake_in_params_is_named_with_its_place(tmp_path, path, value, said):
    assert said in message(project(tmp_path, put(PARAMS, path, value), SUITE))


@pytest.mark.parametrize(("path", "value", "said"), IN_SUITE)
def test_a_mistake_in_a_suite_is_named_with_its_place(tmp_path, path, value, said):
    assert said in message(project(tmp_path, PARAMS, put(SUITE, path, value)))


@pytest.mark.parametrize("text", ["suite: [mini", "merge:\n\tx: 1\n", "- a\n", "", "suite: \xff"])
@pytest.mark.parametrize("name", ["params.yaml", "suites/smoke.yaml"])
def test_a_settings_file_that_is_no_yaml_mapping_is_named(tmp_path, name, text):
    (project(tmp_path, PARAMS, SUITE) / name).write_bytes(text.encode("latin-1"))
    assert name in message(tmp_path)


@pytest.mark.parametrize("verb", ["prepare", "evaluate"])
def test_a_stage_of_a_role_that_no_experiment_has_is_refused_and_writes_nothing(tmp_path, monkeypatch, capsys, verb):
    monkeypatch.chdir(project(tmp_path, PARAMS, SUITE))
    assert cli.main(["stage", verb, "clip_b23-8"]) == cli.MISTAKE
    assert "did you mean 'clip_b32'" in capsys.readouterr().err and not (tmp_path / "outputs").exists()
