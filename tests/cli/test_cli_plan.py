"""`featcal plan`: from config.json alone, and every mistake as one message."""

import json
from pathlib import Path

import pytest
import torch
import transformers as tf
from families import GROUPED
from test_cli import refused
from tiny import VISION

from featcal.calibration.estimate import Job, estimate, model_shape
from featcal.cli import main as cli
from featcal.models.families import plan_for
from featcal.settings import Calibration

TASKS = ("cars", "dtd")
EXPERTS = [word for task in TASKS for word in ("--expert", f"{task}={task}")]
PLAN = ["plan", "--base", "base", "--merged", "merged", *EXPERTS]


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


def needs(arguments, capsys) -> dict:
    assert cli.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_other_heads_and_vocabularies_have_the_same_shape(llama, capsys):
    expected = needs([*PLAN, "--set", "tokens=9"], capsys)
    changed(
        Path("cars/config.json"), architectures=["LlamaForSequenceClassification"], num_labels=5
    )
    changed(Path("dtd/config.json"), vocab_size=101)
    assert needs([*PLAN, "--set", "tokens=9"], capsys) == expected
    changed(Path("dtd/config.json"), num_hidden_layers=3)
    assert "layers.2" in refused([*PLAN, "--set", "tokens=9"], Path(), capsys)


def test_the_estimate_is_that_of_the_model_itself(vision, capsys):
    found = needs([*PLAN, "--samples", "7", "--set", "batch=3", "--preset", "paper"], capsys)
    model = tf.CLIPVisionModel(tf.CLIPVisionConfig(**VISION, intermediate_size=96)).to("meta")
    batch, paper = {"pixel_values": torch.empty(3, 3, 16, 16, device="meta")}, Calibration()
    job = Job(2, 7, 3, paper, drawn=2 * 7 * 3 * 16 * 16)
    expected = estimate(model_shape(model.eval(), plan_for(model), batch, paper), job)
    assert {part: found[part] for part in expected} == expected
    assert found["host_bytes"] == sum(expected["host"].values()) and found["device_bytes"] == 0
    assert found["flops"] == sum(expected["operations"].values())


def test_half_precision_halves_what_weights_and_features_take(llama, capsys):
    whole, half = (
        needs([*PLAN, "--set", "tokens=8", "--dtype", dtype], capsys)["host"]
        for dtype in ("float32", "bfloat16")
    )
    assert 2 * half["weights"] == whole["weights"] and half["systems"] == whole["systems"]
    assert half["waiting features"] < whole["waiting features"]


def test_a_gpu_and_several_processes_share_the_memory(vision, capsys):
    several = [*PLAN, "--device", "cuda", "--set", "device_memory=1KB", "--host-memory", "2KB"]
    found = needs([*several, "--set", "ranks=2"], capsys)
    alone = needs(PLAN, capsys)
    waiting = [found[place]["waiting features"] for place in ("device", "host", "disk")]
    assert waiting[:2] == [1000, 2000] and 2 * sum(waiting) == alone["host"]["waiting features"]
    assert cli.main(PLAN) == 0
    printed = capsys.readouterr().out
    assert "2 tasks of 256 samples, in batches of 32" in printed and "host memory:" in printed


def test_masks_of_padded_text_are_planned_for(llama, capsys):
    even, padded = (
        needs([*PLAN, "--set", "tokens=32", *more], capsys)["host"]["waiting features"]
        for more in ([], ["--set", "padded=true"])
    )
    assert padded > even


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*PLAN, "--base", "nowhere"], "nowhere: no such file or folder"),
        ([*PLAN, "--expert", "new"], "NAME=MODEL"),
        ([*PLAN, "--expert", "dtd=dtd"], "second time"),
        ([*PLAN, "--set", "tokens=50"], "plan.tokens: 50 cannot be used; it is for text models"),
        (
            [*PLAN, "--host-memory", "8 gigs"],
            "--host-memory: '8 gigs' cannot be used; it must be a",
        ),
        *[([*PLAN, "--host-memory", size], "--host-memory") for size in ("GiB", "-1GiB", "1e9")],
        ([*PLAN, "--set", "device_memory=much"], "plan.device_memory: 'much'"),
        ([*PLAN, "--dtype", "float16"], "--dtype: 'float16' cannot be used; it must be float32 or"),
        ([*PLAN, "--device", "tpu"], "--device: 'tpu'"),
        (
            [*PLAN, "--set", "ranks=3"],
            "plan.ranks: 3 cannot be used; it must be at most the number",
        ),
        ([*PLAN, "--samples", "0"], "--samples"),
        (PLAN[:5], "--expert"),
    ],
)
def test_a_mistake_in_the_arguments_is_one_message_that_names_it(vision, capsys, arguments, said):
    assert said in refused(arguments, Path(), capsys)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
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
    assert "dtd/config.json" in refused(PLAN, Path(), capsys)


def test_an_expert_of_another_shape_is_named_with_the_key_and_both_values(vision, capsys):
    changed(Path("dtd/config.json"), intermediate_size=64)
    message = refused(PLAN, Path(), capsys)
    assert "[96, 32] in base (base), but [64, 32] in expert 'dtd' (dtd)" in message


def test_a_merged_model_of_another_depth_is_named_with_the_key(vision, capsys):
    changed(Path("merged/config.json"), num_hidden_layers=3)
    assert "base (base): no tensor named 'encoder.layers.2" in refused(PLAN, Path(), capsys)


def test_text_models_need_a_number_of_tokens_within_their_positions(llama, capsys):
    assert "plan.tokens: nothing is given; it must be given for LlamaForCausalLM" in refused(
        PLAN, Path(), capsys
    )
    assert "plan.tokens: 65 cannot be used; it must be at most 64" in refused(
        [*PLAN, "--set", "tokens=65"], Path(), capsys
    )


def test_a_model_that_cannot_run_without_weights_is_refused(llama, capsys, monkeypatch):
    def adaptive(self, input_ids, **_):
        return input_ids[: int(input_ids.max())]

    monkeypatch.setattr(tf.LlamaForCausalLM, "forward", adaptive)
    assert "LlamaForCausalLM: its forward depends on values" in refused(
        [*PLAN, "--set", "tokens=8"], Path(), capsys
    )
