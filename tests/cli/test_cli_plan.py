"""`featcal plan`: from config.json alone, near what a run computes, and every mistake as one
message.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers as tf
from families import FAMILIES, GROUPED
from test_cost import counted
from tiny import VISION, averaged, clip, images, make, shifted

from featcal.cli import main as cli
from featcal.cli.sizes import bytes_of
from featcal.errors import BadSetting
from featcal.settings import Calibration

TASKS = ("cars", "dtd")
EXPERTS = [word for task in TASKS for word in ("--expert", f"{task}={task}")]
PLAN = ["plan", "--base", "base", "--merged", "merged", *EXPERTS]
BUILT = {
    "clip_vision": lambda: clip(dtype=torch.float32),
    "t5": FAMILIES["t5"].build,
    "llama": FAMILIES["llama"].build,
}
BUILT |= {
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**GROUPED, num_local_experts=4))
}
TOKENS = {"t5": 9, "llama": 9, "mixtral": 40}  # enough that no expert is left out for having few


def config_folders(folder: Path, config, name: str) -> None:
    """Folders with nothing but config.json."""
    for role in ("base", "merged", *TASKS):
        (folder / role).mkdir()
        text = json.dumps(config.to_dict() | {"architectures": [name]})
        (folder / role / "config.json").write_text(text)


def changed(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def vision(tmp_path, monkeypatch):
    config_folders(tmp_path, tf.CLIPVisionConfig(**VISION, intermediate_size=96), "CLIPVisionModel")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def llama(tmp_path, monkeypatch):
    config_folders(
        tmp_path, tf.LlamaConfig(**GROUPED, max_position_embeddings=64), "LlamaForCausalLM"
    )
    monkeypatch.chdir(tmp_path)


def told(arguments, capsys) -> dict:
    assert cli.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(arguments, capsys) -> str:
    assert cli.main(arguments) == cli.MISTAKE
    printed = capsys.readouterr()
    assert (
        printed.out == "" and printed.err.count("featcal:") == 1 and "Traceback" not in printed.err
    )
    return printed.err


def batches_of(name: str, samples: int, size: int, tokens: int):
    """Real batches of the shapes that are planned for."""
    if name == "clip_vision":
        return images(1, samples, size, torch.float32)
    ids = torch.randint(2, 97, (samples, tokens), generator=torch.Generator().manual_seed(0)).split(
        size
    )
    return [
        {"input_ids": part} | ({"decoder_input_ids": part} if name == "t5" else {}) for part in ids
    ]


def test_heads_and_rows_of_words_of_their_own_are_no_other_shape(llama, capsys):
    expected = told([*PLAN, "--tokens", "9"], capsys)
    changed(
        Path("cars/config.json"), architectures=["LlamaForSequenceClassification"], num_labels=5
    )
    changed(Path("dtd/config.json"), vocab_size=101)
    assert told([*PLAN, "--tokens", "9"], capsys) == expected
    changed(Path("dtd/config.json"), num_hidden_layers=3)
    assert "num_hidden_layers" in refused([*PLAN, "--tokens", "9"], capsys)


@pytest.mark.parametrize(
    ("name", "preset"), [*((name, "paper") for name in BUILT), ("clip_vision", "best")]
)
def test_the_work_of_a_real_run_is_within_5_percent_of_the_plan_made_from_config_files(
    name, preset, tmp_path, monkeypatch, capsys
):
    base = make(BUILT[name], dtype=torch.float32)
    config_folders(tmp_path, base.config, type(base).__name__)
    monkeypatch.chdir(tmp_path)
    tokens = ["--tokens", str(TOKENS[name])] if name in TOKENS else []
    planned = told([*PLAN, "--samples", "7", "--batch", "3", "--preset", preset, *tokens], capsys)
    experts = {task: shifted(base, 10 + i) for i, task in enumerate(TASKS)}
    batches = {task: batches_of(name, 7, 3, TOKENS.get(name)) for task in TASKS}
    merged = averaged(list(experts.values()))
    _, true = counted(
        merged=merged,
        base=base,
        experts=experts,
        batches=batches,
        settings=Calibration.preset(preset),
    )
    assert planned["flops"] == pytest.approx(true, rel=0.05)


def test_half_precision_halves_what_weights_and_features_take(llama, capsys):
    whole, half = (
        told([*PLAN, "--tokens", "8", "--dtype", dtype], capsys)
        for dtype in ("float32", "bfloat16")
    )
    assert 2 * half["phases"]["observe"]["weights"] == whole["phases"]["observe"]["weights"]
    assert half["phases"]["observe"]["systems"] == whole["phases"]["observe"]["systems"]
    assert half["waiting"]["host"] < whole["waiting"]["host"]


def test_masks_of_padded_text_are_planned_for(llama, capsys):
    even, padded = (
        told([*PLAN, "--tokens", "32", *more], capsys)["waiting"]["host"]
        for more in ([], ["--padded"])
    )
    assert padded > even


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*PLAN, "--base", "nowhere"], "nowhere: no such file or folder"),
        ([*PLAN, "--expert", "new"], "name=FOLDER"),
        ([*PLAN, "--expert", "dtd=dtd"], "second time"),
        ([*PLAN, "--tokens", "50"], "--tokens: 50 cannot be used; it is for text models"),
        (
            [*PLAN, "--host-memory", "8 gigs"],
            "--host-memory: '8 gigs' cannot be used; it must be a number with a unit",
        ),
        ([*PLAN, "--device-memory", "much"], "--device-memory: 'much'"),
        (
            [*PLAN, "--dtype", "float16"],
            "--dtype: 'float16' cannot be used; it must be float32 or bfloat16",
        ),
        ([*PLAN, "--device", "tpu"], "--device: 'tpu'"),
        (
            [*PLAN, "--ranks", "3"],
            "--ranks: 3 cannot be used; it must be at most the number of experts, 2",
        ),
        ([*PLAN, "--samples", "0"], "--samples"),
        (PLAN[:5], "--expert"),
    ],
)
def test_a_mistake_in_the_arguments_is_one_message_that_names_it(vision, capsys, arguments, said):
    assert said in refused(arguments, capsys)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"architectures": ["CLIPVisionModel"], "model_type": "clip_vision_model", "hidden_size": 0}',
    ],
)
def test_a_config_that_makes_no_model_is_named(vision, capsys, text):
    Path("dtd/config.json").write_text(text)
    assert "dtd/config.json" in refused(PLAN, capsys)


def test_an_expert_of_another_shape_is_named_with_the_key_and_both_values(vision, capsys):
    changed(Path("dtd/config.json"), intermediate_size=64)
    message = refused(PLAN, capsys)
    assert (
        "config.json: intermediate_size: 96 in base (base), but 64 in expert 'dtd' (dtd)" in message
    )


def test_a_merged_model_of_another_depth_is_named_with_the_key(vision, capsys):
    changed(Path("merged/config.json"), num_hidden_layers=3)
    assert "num_hidden_layers: 2 in base (base), but 3 in merged (merged)" in refused(PLAN, capsys)


def test_text_models_want_to_know_how_many_tokens_at_most_their_positions(llama, capsys):
    assert "--tokens: nothing is given; it must be named for LlamaForCausalLM" in refused(
        PLAN, capsys
    )
    assert "--tokens: 65 cannot be used; it must be at most 64" in refused(
        [*PLAN, "--tokens", "65"], capsys
    )


def test_a_model_that_cannot_run_without_numbers_is_refused_not_guessed(llama, capsys, monkeypatch):
    def adaptive(self, input_ids, **_):
        return input_ids[: int(input_ids.max())]

    monkeypatch.setattr(tf.LlamaForCausalLM, "forward", adaptive)
    assert "LlamaForCausalLM: its forward depends on numbers" in refused(
        [*PLAN, "--tokens", "8"], capsys
    )


@pytest.mark.parametrize("text", ["", "GiB", "8GiBs", "-1GiB", "1e9", "8 G iB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(BadSetting, match="--host-memory"):
        bytes_of("--host-memory", text)
