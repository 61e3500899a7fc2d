"""Edits on the page book/change.md fit the files and make stale what the page says."""

import re
from pathlib import Path

import pytest
from dvc.utils.hydra import apply_overrides
from hydra.core.override_parser import overrides_parser  # noqa: F401  before the antlr4 of sympy
from resolved import laid_out, settings_of_stages, stages_of_dvc_repro
from test_recomputed import key_of, made_by, touched

from pipeline import ROOT, settings
from reproduction.engine.context import load_context
from reproduction.experiments import load_experiments, read_all, studies

TEXT = (ROOT / "book/change.md").read_text("utf-8")
EDITS = dict(re.findall(r"<!-- edit: (\w+) -->\n```diff\n(.*?)```", TEXT, re.S))


def edited(name: str) -> tuple[str, str]:
    """The file that an edit of the page is made in, and its text afterwards."""
    file = {"task": "suites/mini.yaml", "lambda": "params.yaml"}.get(name, "pipeline/models.yaml")
    lines = EDITS[name].splitlines(keepends=True)
    old, new = ("".join(line[1:] for line in lines if line.startswith(sign)) for sign in "-+")
    text = (ROOT / file).read_text("utf-8")
    start = text.index("calibrate:\n") if name in ("samples", "merger") else 0
    assert old in text[start:], f"book/change.md: {name} is not in {file} any more"
    return file, text[:start] + text[start:].replace(old, new, 1)


def changed(name: str, folder: Path) -> set[str]:
    """Return the stages whose settings in params.yaml an edit changes."""
    file, text = edited(name)
    (laid_out(folder) / file).write_text(text, "utf-8")
    load_experiments(folder / "params.yaml")
    return set(touched(read_all(folder / "params.yaml")))


def test_lambda_changes_calibrations_controls_and_studies_of_one_role(tmp_path):
    stages = changed("lambda", tmp_path)
    verbs = {made_by(stage) for stage in stages}
    params = settings()
    kinds = {name for name in studies() if any(key.startswith("clip_b32-") for key in params[name])}
    assert verbs == {"calibrate", *kinds}
    assert {key_of(stage).partition("-")[0] for stage in stages} == {"clip_b32"}


SIZES = {"calibrate@clip_b32-8", "calibrate@clip_l14-8"}
EDITS_OF_MODELS = [  # the edit, the stages that it makes stale, and a run that it changes
    ("samples", SIZES, "clip_b32-8-wudi-suite", 512),
    ("merger", SIZES, "clip_b32-8-ties-suite", None),
    ("encoder", {"calibrate@minilm-8", "expert_seeds@minilm-8"}, "minilm-8-average-suite", 128),
]


@pytest.mark.parametrize(("name", "stages", "key", "samples"), EDITS_OF_MODELS)
def test_an_edit_of_merged_models_changes_only_calibrations(tmp_path, name, stages, key, samples):
    assert changed(name, tmp_path) == stages
    run = load_experiments(tmp_path / "params.yaml").calibrate[key]
    assert run.calibration and samples in (run.samples, None)


def test_dvc_repro_leaves_the_encoder_alone():
    everything = stages_of_dvc_repro()
    assert {"calibrate@clip_b32-8", "page@table01", "book"} <= everything
    assert not {"calibrate@minilm-8", "expert_seeds@minilm-8"} & everything


def settings_of_suite(folder: Path) -> dict[str, dict]:
    """By stage, the values of the suite's file that DVC compares."""
    with settings_of_stages(folder) as deps:
        suite = {stage: dep for stage, dep in deps if Path(dep.def_path).name == "mini.yaml"}
        return {stage: dep.read_params(flatten=False) for stage, dep in suite.items()}


def test_a_task_left_out_begins_with_the_images(tmp_path):
    file, text = edited("task")
    before = settings_of_suite(laid_out(tmp_path / "before"))
    (laid_out(tmp_path / "after") / file).write_text(text, "utf-8")
    load_experiments(tmp_path / "after/params.yaml")
    after = settings_of_suite(tmp_path / "after")
    kinds = {stage.partition("@")[0] for stage, values in after.items() if values != before[stage]}
    assert kinds == {"prepare_data", "prepare"}


OPTIONS = {  # by main setting on the page, the stages that it makes stale, and what it changes
    "featcal.clip_b32.suite.ridge=0.01": "calibrate",
    "featcal.clip_b32.samples=64": "calibrate",
    "featcal.clip_b32.suite.anchor_blend=4": "calibrate",
    "featcal.clip_b32.suite.interpolation=0.5": "calibrate",
    "mergers=[task_arithmetic]": "merge",
    "tasks=[mnist,svhn,dtd]": "prepare",
}


def test_the_page_names_an_option_of_dvc_exp_for_every_main_setting(tmp_path):
    assert set(re.findall(r"-S '?([^\s'`]+)", TEXT)) == {*OPTIONS, "suite=files"}
    params = laid_out(tmp_path) / "params.yaml"
    apply_overrides(str(params), ["suite=files"])
    assert load_experiments(params).suite == load_context(tmp_path).suite.name == "files"


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_dvc_exp_reaches_the_stages_of_its_setting(tmp_path, option):
    apply_overrides(str(laid_out(tmp_path) / "params.yaml"), [option])
    stages = touched(read_all(tmp_path / "params.yaml"))
    kinds = {stage.partition("@")[0].partition("_")[0] for stage in stages}
    assert OPTIONS[option] in kinds and not kinds & {"adapt", "evaluate"}
    context = load_context(tmp_path)
    calibrated = context.experiments.calibrate["clip_b32-8-task_arithmetic-suite"]
    merged = context.experiments.merged_in("clip_b32", 8).values()
    actual = {"samples": calibrated.samples, **calibrated.calibration.model_dump()}
    actual |= {"mergers": {run.upstream for run in merged}}
    actual |= {"tasks": set(context.suite.tasks_of("clip_b32", 20))}
    name, _, value = option.rpartition("=")
    expected = set(value.strip("[]").split(",")) if value.startswith("[") else float(value)
    assert actual[name.rpartition(".")[2]] == expected
