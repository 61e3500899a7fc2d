"""The page on changing one thing: its edits fit the files as they are, and DVC finds stale what the
page says.
"""

import re
from pathlib import Path

from resolved import laid_out, settings_of_stages, stages_of_dvc_repro
from test_recomputed import touched

from pipeline import ROOT
from reproduction.experiments import load_experiments, read_all

TEXT = (ROOT / "book/change.md").read_text("utf-8")
EDITS = dict(re.findall(r"<!-- edit: (\w+) -->\n```diff\n(.*?)```", TEXT, re.S))


def edited(name: str) -> tuple[str, str]:
    """The file that an edit of the page is made in, and its text afterwards."""
    file = "suites/mini.yaml" if name == "task" else "params.yaml"
    lines = EDITS[name].splitlines(keepends=True)
    old, new = ("".join(line[1:] for line in lines if line.startswith(sign)) for sign in "-+")
    text = (ROOT / file).read_text("utf-8")
    start = text.index("calibrate:\n") if name in ("samples", "merger") else 0
    assert old in text[start:], f"book/change.md: {name} is not in {file} any more"
    return file, text[:start] + text[start:].replace(old, new, 1)


def changed(name: str, folder: Path) -> set[str]:
    """The stages whose settings in params.yaml an edit changes, as DVC has resolved what each
    reads.
    """
    file, text = edited(name)
    (laid_out(folder) / file).write_text(text, "utf-8")
    load_experiments(folder / "params.yaml")
    return set(touched(read_all(folder / "params.yaml")))


def test_lambda_changes_calibrations_controls_and_studies_of_images_and_no_merger_or_adapter(
    tmp_path,
):
    stages = changed("lambda", tmp_path)
    assert {
        "calibrate@clip_b32-8",
        "calibrate_pool@clip_l14-20",
        "ablate@clip_b32-8",
        "sweep@clip_b32-8",
    } <= stages
    kinds = {stage.partition("@")[0] for stage in stages}
    studies = {
        "samples",
        "corrupted",
        "task_counts",
        "cost",
        "sweep",
        "theory",
        "tune",
        "beyond",
        "field",
    }
    assert kinds == {"calibrate", "calibrate_pool", "ablate", *studies}
    assert not [stage for stage in stages if "glue" in stage or "mergebench" in stage]


def test_samples_of_one_merged_model_change_the_calibrations_of_both_sizes_alone(tmp_path):
    assert changed("samples", tmp_path) == {"calibrate@clip_b32-8", "calibrate@clip_l14-8"}
    run = load_experiments(tmp_path / "params.yaml").calibrate["clip_b32-8-wudi-suite"]
    assert run.samples == 512


def test_another_merger_is_one_row(tmp_path):
    assert changed("merger", tmp_path) == {"calibrate@clip_b32-8", "calibrate@clip_l14-8"}
    assert load_experiments(tmp_path / "params.yaml").calibrate["clip_b32-8-ties-suite"].calibration


def test_an_edit_of_the_encoder_changes_what_is_made_with_those_samples_and_dvc_repro_leaves_it(
    tmp_path,
):
    assert changed("encoder", tmp_path) == {"calibrate@minilm-8", "expert_seeds@minilm-8"}
    assert (
        load_experiments(tmp_path / "params.yaml").calibrate["minilm-8-average-suite"].samples
        == 128
    )
    everything = stages_of_dvc_repro()
    assert {"calibrate@clip_b32-8", "page@table01", "book"} <= everything
    assert not {"calibrate@minilm-8", "expert_seeds@minilm-8"} & everything


def settings_of_suite(folder: Path) -> dict[str, dict]:
    """By stage, the values of the suite's file that DVC compares."""
    with settings_of_stages(folder) as found:
        return {
            stage: dep.read_params(flatten=False)
            for stage, dep in found
            if Path(dep.def_path).name == "mini.yaml"
        }


def test_a_task_left_out_begins_with_the_images(tmp_path):
    file, text = edited("task")
    before = settings_of_suite(laid_out(tmp_path / "before"))
    (laid_out(tmp_path / "after") / file).write_text(text, "utf-8")
    load_experiments(tmp_path / "after/params.yaml")
    stages = {
        stage
        for stage, values in settings_of_suite(tmp_path / "after").items()
        if values != before[stage]
    }
    assert "prepare_data" in stages and {stage.partition("@")[0] for stage in stages} == {
        "prepare_data",
        "prepare",
    }


def test_every_option_of_dvc_exp_on_the_page_reaches_every_calibration_of_images_and_nothing_else(
    tmp_path,
):
    from dvc.utils.hydra import apply_overrides

    options = set(re.findall(r"-S (exp\S+)", TEXT))
    assert options == {"exp.calibrate.ridge=0.01"}
    apply_overrides(str(laid_out(tmp_path) / "params.yaml"), sorted(options))
    stages = touched(read_all(tmp_path / "params.yaml"))
    assert {stage.partition("@")[0] for stage in stages} == {"calibrate", "calibrate_pool"}
    told = load_experiments(tmp_path / "params.yaml")
    images = [
        run
        for run in told.calibrate.values()
        if isinstance(run.pool, int) and run.calibration and run.setting == "suite"
    ]
    assert images and {run.calibration.ridge for run in images} == {0.01}
    assert told.studies["ablate"]["clip_b32-8"].featcal.ridge != 0.01
