"""The playground's refusals and notes; what it computes is held against the command line in
test_smoke.py.
"""

import nbformat
import pytest
from synthetic_results import write_project

from featcal.errors import BadSetting, UnknownKey
from featcal.settings import project_root
from reproduction import playground
from reproduction.engine.context import load_context
from reproduction.report import played

VALUES = {
    "ridge": 1e-6,
    "anchor_blend": 2.0,
    "interpolation": 0.9,
    "samples": 64,
    "test_images": 200,
}


def play(root, role="clip_b32", pool=8, merger="task_arithmetic", **values):
    return playground.play(role, pool, merger, start=root, **VALUES | values)


@pytest.fixture
def project(tmp_path):
    write_project(tmp_path, empty=True)
    return tmp_path


@pytest.mark.parametrize("role", ["clip_b32", "clip_l14"])
def test_without_experts_it_says_how_to_make_them(project, role):
    run = play(project, role=role)
    assert f"dvc repro pipeline/images/dvc.yaml:prepare@{role}-8" in played.told(run).text
    assert all(
        "not run" in show(run).text
        for show in (played.told, played.accuracies, played.drift, played.command_line)
    )


@pytest.mark.parametrize(
    ("chosen", "error", "message"),
    [
        ({"role": "clip_b23"}, UnknownKey, "did you mean 'clip_b32'"),
        ({"pool": 9}, BadSetting, "there are 8, 14, 20"),
        ({"merger": "adamerging"}, UnknownKey, "known: average, task_arithmetic, ties"),
        ({"ridge": 0.0}, BadSetting, "ridge"),
        ({"interpolation": 1.5}, BadSetting, "less than or equal to 1"),
    ],
)
def test_a_wrong_word_or_value_is_one_clear_error_before_anything_is_read(
    project, chosen, error, message
):
    with pytest.raises(error, match=message):
        play(project, **chosen)


def test_the_notebook_starts_at_the_settings_chosen_for_the_suite():
    root, given = project_root(), {}
    page = nbformat.read(root / "notebooks" / "playground.ipynb", as_version=4)
    exec(next(cell.source for cell in page.cells if cell["id"] == "parameters"), given)
    chosen = (
        load_context(root).experiments.calibrate["clip_b32-8-task_arithmetic-suite"].calibration
    )
    names = ("ridge", "anchor_blend", "interpolation")
    assert [given[name] for name in names] == [getattr(chosen, name) for name in names]


def test_accuracies_are_told_by_task_with_the_change_that_calibration_makes(project):
    right = {"base": 40, "merged": 60, "featcal": 75, "expert": 90}
    counted = {model: {"mnist": (count, 100), "dtd": (50, 100)} for model, count in right.items()}
    run = played.Played(play(project).wanted, counted)
    lines = played.accuracies(run).text.splitlines()
    assert lines[2].split() == ["MNIST", "40.0", "60.0", "75.0", "↑15.0", "90.0"]
    assert lines[-1].split() == ["Average", "45.0", "55.0", "62.5", "↑7.5", "70.0"]
