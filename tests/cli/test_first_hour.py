"""Models are named once: what merge records serves fix, compare, evaluate and plan."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import checkpoints
import pytest
import torch
from huggingface_hub import ModelCard
from test_cli import here, refused, told
from test_worked_paths import PICTURES, llamas, merged_as_mergekit_does, recipe_of_the_page  # noqa: F401

import featcal
from featcal.cli import main as cli
from featcal.data.batches import Draw, draw_batches, draw_indices
from featcal.data.places import Location
from featcal.errors import FeatCalError
from featcal.evaluation.accuracy import zero_shot_head
from featcal.models.load import load_clip, load_tokenizer
from featcal.models.stored import skeleton

EXPERTS = {"math": "models/math", "code": "models/code"}
DATA = {"math": "math.jsonl", "code": "code.jsonl"}
NAMED = "--expert math=models/math --expert code=models/code".split()
BY_NAME = [part for task, path in DATA.items() for part in ("--data", f"{task}={path}")]


@pytest.fixture
def merged(llamas) -> Path:
    return Path(featcal.merge("average", "base", EXPERTS, out="merged"))


def unseen(draw: Draw) -> dict:
    locations = {task: Location(Path(path)) for task, path in DATA.items()}
    return draw_batches(skeleton("base"), [Path("base")], locations, draw)


def test_fix_compares_before_and_after_on_samples_that_are_new(merged, capsys, monkeypatch):
    """The oracle is featcal.compare on the samples after the first eight of each task's twelve."""
    with monkeypatch.context() as patch:
        patch.setattr("featcal.cli.compare.add_to_card", Mock(side_effect=KeyboardInterrupt))
        assert cli.main(["fix", "merged", *BY_NAME]) == cli.INTERRUPTED
        assert not Path("merged-calibrated").exists()
    assert cli.main(["fix", "merged", *BY_NAME, "--json"]) == 0
    printed = capsys.readouterr()
    rows, noted = json.loads(printed.out)["experts"], printed.err
    record = json.loads(Path("merged-calibrated/featcal.json").read_text())
    assert record["samples"] == {"math": 8, "code": 8}
    models = {"before": "merged", "after": "merged-calibrated"}
    data = ModelCard.load("merged-calibrated/README.md").data
    stated = {(one.dataset_name, one.metric_type): one.metric_value for one in data.eval_results}
    assert data.model_name == "merged-calibrated"
    measured = featcal.compare(models, EXPERTS, unseen(Draw(4, 42, 32, skip=8)))
    for row, before, after in zip(rows, measured[::2], measured[1::2], strict=True):
        assert (row["expert"], row["samples"], 4) == (after.expert, 4, after.samples)
        assert row["before"] == pytest.approx(before.kl, rel=1e-3)
        assert stated[row["expert"], "kl"] == pytest.approx(row["after"], rel=1e-3)
        difference = after.than_first["kl"]
        assert row["after"] - row["before"] == pytest.approx(difference.mean, rel=0.1)
        beyond = abs(difference.mean) > 2 * difference.error
        expected = ("better" if difference.mean < 0 else "worse") if beyond else "same"
        assert row["verdict"] == expected
    assert "math: 12 samples, 8 to calibrate, 4 held out" in noted
    shutil.rmtree("merged-calibrated")
    monkeypatch.chdir(merged)  # the current folder is written next to it
    assert cli.main(["fix", ".", *(part.replace("=", "=../") for part in BY_NAME)]) == 0
    assert Path("../merged-calibrated/model.safetensors").is_file()


def test_a_record_holds_no_path_of_the_machine_and_moves_with_its_models(merged, tmp_path, capsys):
    text = (merged / "featcal.json").read_text()
    assert json.loads(text)["base"] == "../base" and str(tmp_path) not in text
    Path("moved").mkdir()
    for name in ("base", "models", "merged", "math.jsonl", "code.jsonl"):
        shutil.move(name, f"moved/{name}")
    assert told(capsys, "plan", "--merged", "moved/merged", "--set", "tokens=8")["host_bytes"] > 0


def test_compare_leaves_out_what_calibration_used_and_takes_what_is_left(merged, capsys):
    arguments = ["calibrate", "--merged", "merged", *BY_NAME, "--preset", "paper", "--samples", "5"]
    assert cli.main([*arguments, "--out", "new"]) == 0
    compared = ["compare", "--model", "merged=merged", "--model", "new=new", *BY_NAME]
    rows = told(capsys, *compared)["agreement"]
    assert {row["samples"] for row in rows} == {7}
    batches = unseen(Draw(7, 42, 32, skip=5))
    called = featcal.compare({"merged": "merged", "new": "new"}, EXPERTS, batches)
    assert [row["kl"] for row in rows] == [one.kl for one in called]
    assert cli.main([*arguments, "--seed", "7", "--out", "other"]) == 0
    for more in (["--seed", "7"], ["--model", "other=other"]):
        assert cli.main([*compared, *more]) == 0
        assert "calibration drew with another seed" in capsys.readouterr().err
    assert cli.main([*arguments[:-1], "12", "--out", "all"]) == 0
    message = refused([*compared[:-5], "new=all", *BY_NAME], Path(), capsys)
    assert "it must have 14 samples or more, 12 to leave out; it has 12" in message
    Path("math.jsonl").write_text(Path("math.jsonl").read_text() + 2 * '{"text": "one more"}\n')
    rows = told(capsys, *compared, "--skip", "0")["agreement"]  # equal samples count once
    assert {row["samples"] for row in rows if row["expert"] == "math"} == {13}
    auto = told(capsys, *arguments[:-4], "--out", "auto", "--dry-run")["drawn"]
    assert auto["math"]["samples"] == 13, "one of two equal samples could be held out"
    record = Path("new/featcal.json").read_text()
    for key, reason in ("samples", "had another number of rows"), ("old", "did not record its"):
        Path("new/featcal.json").write_text(record.replace("samples", key))
        assert cli.main(compared) == 0
        assert f"calibration {reason}" in capsys.readouterr().err


def test_compare_knows_samples_of_merges_earlier_runs_and_other_names(merged, capsys, monkeypatch):
    few = [*BY_NAME, "--samples", "5"]
    fuse = ["merge", "regmean", "--base", "base", *NAMED, *few, "--out", "fused"]
    with monkeypatch.context() as patch:
        patch.setattr("featcal.cli.inputs.Request.record", Mock(side_effect=KeyboardInterrupt))
        assert cli.main(fuse) == cli.INTERRUPTED and not Path("fused").exists()
    assert cli.main(fuse) == 0
    compared = ["compare", "--model", "m=fused", *BY_NAME]
    for more in ([], ["--set", "split=test"]):  # a file has no splits
        assert {one["samples"] for one in told(capsys, *compared, *more)["agreement"]} == {7}
    assert "45 samples or more" in refused([*compared, "--samples", "40"], Path(), capsys)
    again = ["calibrate", "--merged", "fused", *few, "--preset", "paper", "--seed", "7"]
    assert cli.main([*again, "--out", "again"]) == 0 == cli.main(["fix", "fused", *BY_NAME])
    assert "fused was made with samples" in capsys.readouterr().err
    renamed = "--expert a=models/math --data a=math.jsonl".split()
    monkeypatch.setattr("featcal.cli.compare.agreements_of", lambda *_: [])
    others = {"drew with another seed": BY_NAME, "had other names of tasks": renamed}
    for reason, named in others.items():
        assert cli.main(["compare", "--model", "m=again", *named]) == 0
        assert f"calibration {reason}" in capsys.readouterr().err
    Path("fused/README.md").unlink()
    monkeypatch.setattr("featcal.cli.compare.agreements_of", lambda *_: pytest.fail("compared"))
    assert "no card" in refused([*compared, "--card"], Path(), capsys)


def test_the_progress_of_a_mixture_counts_the_blocks_of_six_candidates(merged, monkeypatch, capsys):
    lines = Mock(side_effect=FeatCalError("stop"))
    monkeypatch.setattr("featcal.models.modules.packed_experts", lambda _: True)
    monkeypatch.setattr("featcal.cli.calibrate.progress_lines", lines)
    refused(["calibrate", "--merged", "merged", *BY_NAME, "--out", "new"], Path(), capsys)
    lines.assert_called_once_with(7 * skeleton("base").config.num_hidden_layers)


def test_base_and_experts_are_read_from_the_recipe_that_a_card_shows(llamas, capsys):
    recipe = recipe_of_the_page()
    merged_as_mergekit_does(recipe, Path("merged"))
    Path("merged/mergekit_config.yml").unlink()
    Path("merged/README.md").write_text(f"# merged\n\n```yaml\n{recipe.read_text()}```\n")
    recipe.unlink()
    assert told(capsys, "plan", "--merged", "merged", "--set", "tokens=8")["host_bytes"] > 0


def test_a_whole_clip_is_evaluated_without_naming_it_again(here, capsys):
    checkpoints.clip_folder(Path("clip"))
    checkpoints.vision_folder(Path("mnist"), 1)
    checkpoints.pictures(Path("images"), 0, PICTURES)
    assert cli.main("merge average --base clip --expert mnist=mnist --out merged".split()) == 0
    card = Path("merged/README.md").read_text()
    assert "1 expert merged\n\n1 fine-tuned model merged into one by" in card
    asked = ["--data", "mnist=images", "--template", "a photo of a {}"]
    for model in ("clip", "merged"):
        own = told(capsys, "evaluate", "--model", model, *asked)
        assert own == told(capsys, "evaluate", "--model", model, "--clip", "clip", *asked)
    Path("images/few.csv").write_text("image,label\ntest/cat/000.png,a\ntest/dog/000.png,of\n")
    assert cli.main(["evaluate", "--model", "clip", *asked, "--split", "few"]) == 0
    assert "mnist: classes found in this split: a, of; to add" in capsys.readouterr().err
    assert "--clip" in refused(["evaluate", "--model", "mnist", *asked], Path(), capsys)
    run = "calibrate --merged merged --data mnist=images --classes mnist=cat,dog".split()
    chosen = told(capsys, *run, "--samples", "9", "--out", "new")["choice"]["divergence"]
    clip, tokens = load_clip("clip"), load_tokenizer("clip")
    head = zero_shot_head(clip, tokens, ["cat", "dog"], ["a photo of a {}."])
    given = {"base": "clip", "experts": {"mnist": "mnist"}}
    given["batches"] = featcal.load_batches({"mnist": "images"}, "clip", samples=9, seed=42)
    labels = {"mnist": head @ clip.visual_projection.weight}
    assert featcal.calibrate("merged", **given, labels=labels).choice.divergence == chosen
    assert "other options" in refused([*run, "--out", "o", "--ridge", "1"], Path(), capsys)


def test_a_message_names_all_that_is_missing_or_seems_swapped(merged, capsys):
    swapped = "plan --merged base --base merged --set tokens=8 --expert a=base --expert b=base"
    assert cli.main(swapped.split()) == 0
    noted = capsys.readouterr().err
    assert "model swapped?" in noted and "a, b: the weights of all come from base" in noted
    Path("merged/featcal.json").unlink()
    lacking = refused(["calibrate", "--merged", "merged"], Path(), capsys)
    assert "--data, --out, --base, --expert" in lacking
    for wrong in (
        "fix nowhere --base gone --expert math=lost",
        "compare --model m=nowhere --base gone --expert math=lost",
        "evaluate --model nowhere --clip gone --class-means lost",
    ):
        message = refused([*wrong.split(), "--data", "math=away.jsonl"], Path(), capsys)
        assert all(f"{n}: no such" in message for n in ("nowhere", "gone", "lost", "away.jsonl"))
    named = ["fix", "merged", "--base", "base", *NAMED, *BY_NAME[:2]]
    assert "--data code=PATH" in refused(named, Path(), capsys)
    typed = refused([*named, "--data", "cod=code.jsonl"], Path(), capsys)
    assert "did you mean 'code'?" in typed and "--data code=PATH" in typed
    for task in DATA:
        Path(f"{task}.jsonl").write_text('{"question": "a"}\n' * 12)
    message = refused([*named, *BY_NAME[2:]], Path(), capsys)
    assert "math.jsonl, line" in message and "code.jsonl, line" in message
    Path("merged/featcal.json").write_text('{"samples": 1}')
    assert "featcal.json: samples: 1 cannot" in refused(["fix", "merged", *BY_NAME], Path(), capsys)


def test_fix_with_too_few_samples_says_how_many_each_task_needs(merged, capsys):
    lines = Path("math.jsonl").read_text().splitlines(keepends=True)
    Path("math.jsonl").write_text("".join(lines[:11]))
    message = refused(["fix", "merged", *BY_NAME], Path(), capsys)
    assert "at least 12 samples of each" in message
    assert "math has 11" in message and "code has" not in message
    Path("math.jsonl").write_text("".join(lines * 2))
    rows = [lines[i % 12] for i in draw_indices("math", 24, 24, 42)]
    differing = {*rows[18:]} - {*rows[:18]}
    message = refused(["fix", "merged", *BY_NAME], Path(), capsys)
    assert f"only {len(differing)} of 6 samples" in message


def test_classes_are_for_models_without_a_head(merged, capsys):
    run = ["calibrate", "--merged", "merged", *BY_NAME, "--out", "new", "--classes"]
    assert "has a head" in refused([*run, "math=right,wrong"], Path(), capsys)
    for few in ("right", "right,", "right, right"):
        assert "at least two" in refused([*run, f"math={few}"], Path(), capsys)
    assert "a task of --data" in refused([*run, "maths=right,wrong"], Path(), capsys)


def test_a_head_that_no_model_has_is_named(merged, capsys):
    checkpoints.with_tensors(Path("models/math"), {"v_head.summary.weight": torch.ones(1, 32)})
    assert cli.main(["calibrate", "--merged", "merged", *BY_NAME, "--out", "new", "--dry-run"]) == 0
    assert "LlamaForCausalLM has no v_head.summary.weight: not used" in capsys.readouterr().err
