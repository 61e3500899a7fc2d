"""`featcal tune` on tiny models: what it writes, the command it tells, that it goes on, and what it
refuses.
"""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from test_cli import DATA, EXPERTS, FEW, models, ready, refused  # noqa: F401 - fixtures
from test_cli_families import EXPERTS as TEXT_EXPERTS
from test_cli_families import texts  # noqa: F401 - fixture
from test_worked_paths import llamas, lora, merged_as_mergekit_does, recipe_of_the_page  # noqa: F401 - a fixture

from featcal.cli import main as cli

pytest.importorskip("optuna")
MODELS = ["tune", "--merged", "merged", "--base", "base"]
TUNE = [*MODELS, *EXPERTS, *DATA, *FEW, "--trials", "3", "--device", "cpu"]
SPELT = ["--template", "a {}"]


def test_settings_are_written_and_the_command_it_tells_runs(models, capsys):  # noqa: F811
    assert cli.main([*TUNE, "--out", "found.yaml"]) == 0
    printed = capsys.readouterr()
    kept = yaml.safe_load((models / "found.yaml").read_text())
    assert (
        len(kept["trials"]) == 3 and kept["settings"] == kept["trials"][kept["trial"]]["settings"]
    )
    assert kept["trials"][kept["trial"]]["mean"] == min(one["mean"] for one in kept["trials"])
    assert kept["calibrate"] in printed.out and "trial 3 of 3" in printed.err
    assert not list(models.glob(".found*"))
    words = shlex.split(kept["calibrate"])
    assert cli.main(words[1:]) == 0
    settings = json.loads((models / "calibrated/featcal.json").read_text())["settings"]
    assert {name: settings[name] for name in ("ridge", "anchor_blend", "interpolation")} == {
        name: kept["settings"][name] for name in ("ridge", "anchor_blend", "interpolation")
    }


def test_with_a_whole_clip_answers_are_compared_and_json_is_what_the_file_holds(models, capsys):  # noqa: F811
    assert cli.main([*TUNE, "--out", "a.json", "--json"]) == 0
    features = json.loads(capsys.readouterr().out)
    assert features == json.loads((models / "a.json").read_text())
    assert cli.main([*TUNE, "--out", "b.json", "--json", "--clip", "base", *SPELT]) == 0
    answers = json.loads(capsys.readouterr().out)
    assert [one["divergence"] for one in answers["trials"]] != [
        one["divergence"] for one in features["trials"]
    ]


def test_an_interrupted_search_goes_on_behind_the_last_trial(models, capsys, monkeypatch):  # noqa: F811
    from featcal.tuning import tune as module

    whole, tried = module.distances, []

    def stop(*given):
        tried.append(1)
        if len(tried) == 2:
            raise KeyboardInterrupt
        return whole(*given)

    monkeypatch.setattr(module, "distances", stop)
    assert cli.main([*TUNE, "--out", "a.json"]) == cli.INTERRUPTED
    assert (
        "the same command continues" in capsys.readouterr().err and not (models / "a.json").exists()
    )
    assert cli.main([*TUNE, "--out", "a.json"]) == 0
    assert len(tried) == 4  # one, the interrupted one, and the two that were left


def test_text_models_are_tuned_as_they_are(texts):  # noqa: F811
    folder = texts("t5")
    data = "--data a=a.jsonl --data b=b.jsonl --samples 9 --trials 2 --device cpu".split()
    assert cli.main([*MODELS, *TEXT_EXPERTS, *data, "--out", "found.json"]) == 0
    assert set(json.loads((folder / "found.json").read_text())["trials"][0]["divergence"]) == {
        "a",
        "b",
    }


def test_base_and_experts_come_from_a_recipe_and_the_command_it_tells_reads_it_too(llamas, capsys):  # noqa: F811
    """With a LoRA expert, of which no model is left behind."""
    lora(Path("adapters/math"), Path("base"))
    merged_as_mergekit_does(recipe_of_the_page(), Path("merged"))
    recipe_of_the_page(models=[{"model": "base+adapters/math"}, {"model": "models/code"}])
    data = (
        "--data math=math.jsonl --data code=code.jsonl --samples 8 --trials 2 --device cpu".split()
    )
    given = ["tune", "--set", "recipe=merge.yaml", "--merged", "merged", *data]
    assert cli.main([*given, "--out", "found.json"]) == 0
    found = json.loads(Path("found.json").read_text())
    assert (
        set(found["trials"][0]["divergence"]) == {"math", "code"}
        and "--set recipe=merge.yaml" in found["calibrate"]
    )
    assert cli.main(shlex.split(found["calibrate"])[1:]) == 0
    assert not [path for path in Path().iterdir() if path.name.startswith(".")]
    shutil.rmtree("merged")
    shutil.copytree("models/code", "merged")
    capsys.readouterr()
    assert cli.main(["tune", "--merged", "merged", *data, "--out", "more.json"]) == 2
    assert "recipe" in capsys.readouterr().err and not Path("more.json").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--out", "found.txt"], ".json, .yaml"),
        (["--out", "base/config.json"], "name a new file"),
        (["--out", "a.json", "--holdout", "1"], "tune.holdout"),
        (["--out", "a.json", "--clip", "base", "--template", "a picture"], "must hold {}"),
        (["--out", "a.json", "--clip", "mnist"], "CLIPModel"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(models, capsys, more, said):  # noqa: F811
    assert said in refused([*TUNE, *more], models, capsys)
