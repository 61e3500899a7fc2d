"""mergekit's recipes: what is read, what is refused and why, and how their models are found."""

import sys
from pathlib import Path

import pytest
import yaml
from mergekit.config import MergeConfiguration
from test_cli import refused
from test_worked_paths import llamas, merged_as_mergekit_does, recipe_of_the_page  # noqa: F401 - a fixture

from featcal.cli import main as cli
from featcal.errors import BadFile
from featcal.interchange.mergekit import read_recipe, recipe_in

TASK = {"merge_method": "task_arithmetic", "base_model": "base"}
TASK |= {"models": [{"model": "a"}, {"model": "b"}]}


def written(folder: Path, **changes) -> Path:
    content = {key: value for key, value in (TASK | changes).items() if value is not None}
    (folder / "merge.yaml").write_text(yaml.safe_dump(content))
    return folder / "merge.yaml"


def slices(*ranges, names="ab", **more):
    own = [[{"model": n, "layer_range": list(r)} for n in names] for r in ranges]
    return [{"sources": sources} | more for sources in own]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"models": [{"model": "base"}, {"model": "a", "parameters": {"weight": [0, 1]}}]},
        {"models": [{"model": "hub/b@v2+lora/c@main"}, {"model": "b"}]},
        {"models": [{"model": {"model": {"path": "a", "revision": "v1"}, "lora": {"path": "l"}}}]},
        {"models": None, "slices": slices((0, 4))},
        {"models": None, "slices": slices((0, 1), (1, 4))},
        {"models": None, "modules": {"default": {"slices": slices((0, 4))}}},
        {"models": None, "modules": {"default": {"models": [{"model": "a"}]}}},
        {"merge_method": "linear", "base_model": None},
    ],
)
def test_base_and_experts_are_the_models_that_mergekit_refers_to(tmp_path, changes):
    file = written(tmp_path, **changes)
    theirs = MergeConfiguration.model_validate(yaml.safe_load(file.read_text()))
    recipe = read_recipe(file)
    base = theirs.base_model and str(theirs.base_model)
    assert (recipe.method, recipe.base) == (theirs.merge_method, base)
    experts = sorted("+".join(parts) for parts in recipe.experts.values())
    assert experts == sorted({str(model) for model in theirs.referenced_models()} - {base})
    file.write_text(theirs.to_yaml())
    assert read_recipe(file) == recipe


@pytest.mark.parametrize("method", ["slerp", "nearswap", "arcee_fusion"])
def test_where_the_base_model_is_one_of_the_merged_models_it_is_an_expert(tmp_path, method):
    recipe = read_recipe(written(tmp_path, merge_method=method, base_model="a"))
    assert recipe.base is None and [*recipe.experts] == ["a", "b"]
    own = {"base_model": None, "models": None, "slices": slices((0, 4), base_model="a")}
    assert read_recipe(written(tmp_path, merge_method=method, **own)) == recipe


def test_a_base_of_slices_a_path_written_twice_and_a_card_in_latin_1_are_understood(tmp_path):
    wanted = read_recipe(written(tmp_path))
    own = slices((0, 1), (1, 4), base_model="base")
    assert read_recipe(written(tmp_path, base_model=None, models=None, slices=own)) == wanted
    models = [{"model": name} for name in ("./base/", "a", "./a", "b")]
    again = read_recipe(written(tmp_path, models=models))
    assert [*again.experts] == ["a", "b"] and again.base == "base"
    text = (tmp_path / "merge.yaml").read_text()
    (tmp_path / "README.md").write_text(f"caf\xe9\n```yaml\n{text}```\n", "latin-1")
    assert [*read_recipe(recipe_in(tmp_path)).experts] == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"merge_method": None}, "merge_method"),
        ({"models": None, "slices": [{"sources": []}]}, "slices"),
        ({"models": None, "slices": slices((0, 1), (2, 3))}, "no whole models"),
        ({"models": None, "slices": slices((0, 2)) + slices((2, 3), names="ac")}, "no whole"),
        ({"models": None, "slices": slices((1, 3))}, "no whole models"),
        ({"models": None, "modules": {"text": {"models": [{"model": "a"}]}}}, "modules"),
        ({"merge_method": "passthrough"}, "merges nothing"),
        ({"models": None}, "models"),
        ({"models": ["a"]}, "models"),
        ({"models": [{"model": "a+b+c"}]}, "a.b.c"),
        ({"models": [{"model": "base"}]}, "no model besides its base"),
    ],
)
def test_a_recipe_that_calibration_cannot_follow_is_refused(tmp_path, changes, said):
    with pytest.raises(BadFile, match=said):
        read_recipe(written(tmp_path, **changes))


@pytest.mark.parametrize("text", ["", "7", "a: [", "a: 1\n---\nb: 2\n", "\x00"])
def test_a_file_that_is_no_recipe_is_refused(tmp_path, text):
    (tmp_path / "merge.yaml").write_text(text)
    with pytest.raises(BadFile, match="merge.yaml"):
        read_recipe(tmp_path / "merge.yaml")


DATA = ["--data", "math=math.jsonl", "--data", "code=code.jsonl", "--samples", "12", "--out", "new"]
CALIBRATE = ["calibrate", "--set", "recipe=merge.yaml", "--merged", "merged", *DATA]


def test_every_way_a_recipe_can_fall_short_is_one_message_with_a_way_out(llamas, capsys):
    recipe_of_the_page()
    merged_as_mergekit_does(Path("merge.yaml"), Path("merged"))
    twice = [{"model": f"models/{name}"} for name in ("math", "../models/math")]
    for changes, said in (
        ({"merge_method": "linear", "base_model": None}, "--base FOLDER"),
        ({"base_model": "nowhere"}, "nowhere"),
        ({"base_model": "nobody/nothing"}, "merge.yaml; searched in . and in the current"),
        ({"models": twice}, "--base FOLDER --expert math-1"),
        ({"models": [{"model": "models/math"}]}, "code"),
    ):
        recipe_of_the_page(**changes)
        assert said in refused(CALIBRATE, Path(), capsys), changes
    Path("merged/mergekit_config.yml").unlink()
    without = ["calibrate", "--merged", "merged", *DATA]
    assert "mergekit_config.yml" in refused(without, Path(), capsys)


def test_without_mergekit_a_recipe_needs_it_and_options_do_not(llamas, monkeypatch, capsys):
    merged_as_mergekit_does(recipe_of_the_page(), Path("merged"))
    monkeypatch.setitem(sys.modules, "mergekit.config", None)
    models = ["--base", "base", "--expert", "math=models/math", "--expert", "code=models/code"]
    assert "pip install 'featcal[mergekit]'" in refused(CALIBRATE, Path(), capsys)
    by_itself = ["calibrate", "--merged", "merged", *DATA]
    assert "pip install 'featcal[mergekit]'" in refused(by_itself, Path(), capsys)
    assert cli.main([*by_itself, *models, "--dry-run"]) == 0
    capsys.readouterr()
    assert cli.main(["inspect", "merged"]) == 0
    assert "is not installed" in capsys.readouterr().out


def test_models_are_looked_for_next_to_the_recipe_and_options_win(llamas, monkeypatch, capsys):
    recipe_of_the_page(base_model="gone")
    merged_as_mergekit_does(recipe_of_the_page(), Path("merged"))
    Path("elsewhere").mkdir()
    monkeypatch.chdir(llamas / "elsewhere")
    data = "--data math=../math.jsonl --data code=../code.jsonl --samples 12 --out new --dry-run"
    command = f"calibrate --set recipe=../merge.yaml --merged ../merged {data}".split()
    assert cli.main(command) == 0 and "nothing was computed" in capsys.readouterr().out
    assert cli.main([*command, "--base", "../base"]) == 0 and "options: " in capsys.readouterr().err
