"""`featcal plan`: from config.json alone, and every mistake as one message."""

import json
from pathlib import Path

import pytest
import torch
import transformers as tf
from families import GROUPED
from test_cli import here, refused, told
from test_cli_folders import config
from tiny import VISION

from featcal.calibration.estimate import Job, estimate, model_shape
from featcal.cli import main as cli
from featcal.models.plan import plan_for
from featcal.settings import Calibration

TASKS = ("cars", "dtd")
EXPERTS = [word for task in TASKS for word in ("--expert", f"{task}={task}")]
PLAN = ["plan", "--base", "base", "--merged", "merged", *EXPERTS]
CLIP = tf.CLIPVisionConfig(**VISION, intermediate_size=96)
LLAMA = tf.LlamaConfig(**GROUPED, max_position_embeddings=64)


def folders(own, name: str):
    @pytest.fixture
    def made(here):
        for role in ("base", "merged", *TASKS):
            Path(role).mkdir()
            content = own.to_dict() | {"architectures": [name]}
            Path(role, "config.json").write_text(json.dumps(content))

    return made


vision, llama = folders(CLIP, "CLIPVisionModel"), folders(LLAMA, "LlamaForCausalLM")


@pytest.fixture
def needs(capsys):
    return lambda *options: told(capsys, *PLAN, *options)


def test_other_heads_and_vocabularies_have_the_same_shape(llama, needs, capsys):
    nine = ["--set", "tokens=9"]
    expected = needs(*nine)
    config("cars", architectures=["LlamaForSequenceClassification"], num_labels=5)
    config("dtd", vocab_size=101)
    assert needs(*nine) == expected
    config("dtd", num_hidden_layers=3)
    assert "layers.2" in refused([*PLAN, *nine], Path(), capsys)


def test_the_estimate_is_that_of_the_model_itself(vision, needs):
    found = needs("--samples", "7", "--set", "batch=3", "--preset", "paper")
    model = tf.CLIPVisionModel(CLIP).to("meta").eval()
    batch, paper = {"pixel_values": torch.empty(3, 3, 16, 16, device="meta")}, Calibration()
    job = Job(2, 7, 3, paper, drawn=2 * 7 * 3 * 16 * 16)
    expected = estimate(model_shape(model, plan_for(model), batch, paper), job)
    assert {part: found[part] for part in expected} == expected
    assert found["host_bytes"] == sum(expected["host"].values()) and found["device_bytes"] == 0
    assert found["flops"] == sum(expected["operations"].values())


def test_half_precision_halves_what_weights_and_features_take(llama, needs):
    eight = ["--set", "tokens=8", "--dtype"]
    whole, half = (needs(*eight, dtype)["host"] for dtype in ("float32", "bfloat16"))
    assert 2 * half["weights"] == whole["weights"] and half["systems"] == whole["systems"]
    assert half["waiting features"] < whole["waiting features"]


def test_a_gpu_and_several_processes_share_the_memory(vision, needs, capsys):
    paper = ["--preset", "paper"]
    memory = ["--device", "cuda", "--set", "device_memory=1KB", "--host-memory", "2KB"]
    found, alone = needs(*paper, *memory, "--set", "ranks=2"), needs(*paper)
    waiting = [found[place]["waiting features"] for place in ("device", "host", "disk")]
    assert waiting[:2] == [1000, 2000] and 2 * sum(waiting) == alone["host"]["waiting features"]
    loads = {(): "256 samples, in batches of 32", ("--samples", "1"): "1 sample, in batches of 1"}
    for more, load in loads.items():
        assert cli.main([*PLAN, *more]) == 0
        printed = capsys.readouterr().out
        assert f"2 tasks of {load}" in printed and "host memory:" in printed


def test_disk_is_that_of_the_stage_of_auto_in_which_most_features_wait(vision, needs):
    on_disk = ["--host-memory", "0"]
    auto, last = needs(*on_disk), needs(*on_disk, "--preset", "paper", "--samples", "192")
    assert auto["disk"]["waiting features"] == last["disk"]["waiting features"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--base", "nowhere"], "nowhere: no such file or folder"),
        (["--set", "tokens=50"], "tokens: 50 cannot be used; it is for texts, but CLIPV"),
        (["--host-memory", "8 gigs"], "plan.host_memory: '8 gigs' cannot be used; it must be a"),
        (["--host-memory", "-1GiB"], "it must be a number of bytes, such as 8GiB"),
        (["--device", "tpu"], "'--device': 'tpu' is not one of"),
        (["--set", "ranks=3"], "plan.ranks: 3 cannot be used; it must be at most 2"),
    ],
)
def test_a_mistake_in_the_arguments_is_one_message_that_names_it(vision, capsys, options, said):
    assert said in refused([*PLAN, *options], Path(), capsys)


@pytest.mark.parametrize(
    ("folder", "change", "said"),
    [
        ("dtd", {"intermediate_size": 64}, "[96, 32] in base (base), but [64, 32] in expert 'dtd'"),
        ("merged", {"num_hidden_layers": 3}, "base (base): no tensor named 'encoder.layers.2"),
    ],
)
def test_a_model_of_another_shape_is_named_with_the_key(vision, capsys, folder, change, said):
    config(folder, **change)
    assert said in refused(PLAN, Path(), capsys)


@pytest.mark.parametrize(("options", "said"), [([], "nothing is given"), (["65"], "at most 64")])
def test_text_models_need_a_number_of_tokens_within_their_positions(llama, capsys, options, said):
    tokens = [word for number in options for word in ("--set", f"tokens={number}")]
    assert said in refused([*PLAN, *tokens], Path(), capsys)


def test_a_model_that_cannot_run_without_weights_is_refused(llama, capsys, monkeypatch):
    forward = lambda self, input_ids, **_: input_ids[: int(input_ids.max())]  # noqa: E731
    monkeypatch.setattr(tf.LlamaForCausalLM, "forward", forward)
    message = refused([*PLAN, "--set", "tokens=8"], Path(), capsys)
    assert "LlamaForCausalLM: its forward depends on values" in message
