"""Dry runs, logs, JSON and progress; options as arguments of the library; what inspect shows."""

import errno
import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import language
import pytest
import torch
import transformers as tf
from test_cli import CALIBRATE, EVALUATE, MERGE, WEIGHT, models, ready, refused, told, tree

import featcal
from featcal.card import Result
from featcal.cli import inputs, output
from featcal.cli import main as cli
from featcal.cli.calibrate import note_differences
from featcal.cli.inputs import Inputs
from featcal.errors import BadPlan
from featcal.models.checkpoint import LazyCheckpoint
from featcal.models.load import save_model, torch_device
from featcal.settings import Calibration
from tests import checkpoints

DRY = [*CALIBRATE, "--dry-run"]


@pytest.fixture
def without_work(monkeypatch):
    unwanted = Mock(side_effect=AssertionError("computed"))
    monkeypatch.setattr("featcal.calibration.calibrate.calibrate", unwanted)


def test_a_dry_run_prints_needs_and_writes_nothing(models, capsys, without_work, monkeypatch):
    before = tree(models)
    assert cli.main(DRY) == 0
    printed = capsys.readouterr().out
    assert tree(models) == before and "mnist" in printed and "nothing was computed" in printed
    content = told(capsys, *DRY)
    assert content["drawn"]["dtd"] == {"samples": 6, "longest": 0}
    assert content["needs"]["host_bytes"] > 0
    monkeypatch.setattr("featcal.cli.plan.estimated", Mock(side_effect=BadPlan("it", "unknown")))
    assert told(capsys, *DRY) == content | {"needs": None}


def test_a_dry_run_finds_what_a_run_would_stumble_over(models, capsys):
    assert "at most 9" in refused([*DRY, "--samples", "10"], models, capsys)
    whole = LazyCheckpoint(models / "dtd")[WEIGHT].read()
    for broken in (torch.zeros(48, 32), None, torch.full((64, 32), float("nan"))):
        checkpoints.with_tensors(models / "dtd", {WEIGHT: broken})
        assert WEIGHT in refused(DRY, models, capsys)
    more = {"encoder.layers.0.more.weight": torch.zeros(2)}
    checkpoints.with_tensors(models / "dtd", {WEIGHT: whole} | more)
    assert "more.weight" in refused(DRY, models, capsys)


def test_a_disk_without_room_is_named_before_the_work(models, capsys, monkeypatch, without_work):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    for command in (CALIBRATE, DRY, [*MERGE[:-1], "elsewhere"]):
        assert "1000 B" in refused(command, models, capsys)


def test_a_missing_gpu_is_named_before_any_data_are_read(models, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("featcal.data.places.location_of", lambda *_: pytest.fail("read"))
    for command in (CALIBRATE, MERGE, EVALUATE):
        said = refused([*command, "--device", "cuda"], models, capsys)
        assert "needs a GPU" in said and "auto or cpu" in said
    assert torch_device("auto") == torch_device("cpu") == torch.device("cpu")


def test_an_expert_of_another_class_is_noted_and_one_of_the_same_class_is_not(models, capsys):
    base = Path("base")
    note_differences(Inputs(base, base, {"whole": base, "mnist": Path("mnist")}))
    noted = capsys.readouterr().err
    assert "expert 'mnist': a CLIPVisionModel" in noted and "whole" not in noted
    assert "of CLIPModel the vision tower is calibrated" in noted


def test_a_log_file_has_every_block_and_every_mistake(models, monkeypatch):
    before = logging.getLogger().handlers[:]
    monkeypatch.setenv("HOME", str(models))  # ~ is read in every path
    logged = ["--log-file", "~/run.log"]
    at_home = [*CALIBRATE[:-1], "~/new", "--set", "work=~/scratch"]
    assert cli.main([*logged, *at_home]) == 0 and (models / "new").is_dir()
    assert cli.main([*logged, *at_home]) == cli.MISTAKE and not (models / "~").exists()
    assert cli.main([*logged, "--log-level", "lots", *CALIBRATE]) == cli.MISTAKE
    text = (models / "run.log").read_text()
    assert "INFO featcal: vision.01" in text and "ERROR featcal: --out" in text
    for handler in [h for h in logging.getLogger().handlers if h not in before]:
        logging.getLogger().removeHandler(handler)


MORE = "--dtype bfloat16 --host-memory=1.5GiB --ridge 1e-3"
KEYS = "--work w --set resume=false --set residual=0.5 --set modules=fc1"
GIVEN = {"dtype": torch.bfloat16, "host_memory": 3 * 2**29, "work": Path("w"), "resume": False}
CHOSEN = {"settings": Calibration(ridge=1e-3, residual=0.5, modules=("fc1",))}


def test_options_are_keywords_of_the_library(models, monkeypatch):
    called = Mock(return_value=Result(None, Path("new"), []))
    monkeypatch.setattr(featcal, "calibrate", called, raising=False)
    monkeypatch.setattr("featcal.cli.output.new_folder", lambda *_: None)
    for options in (["--preset", "auto"], [*MORE.split(), *KEYS.split()]):
        assert cli.main([*CALIBRATE, *options]) == 0
    auto, given = (call.kwargs for call in called.call_args_list)
    assert auto["settings"] == "auto" and (GIVEN | CHOSEN).items() <= given.items()


def test_inspect_shows_sites_exchange_and_what_stays_as_it_is(models, capsys, monkeypatch):
    monkeypatch.setattr(output.output, "_width", 200, raising=False)
    language.folder(models / "t5", "t5")
    assert cli.main(["inspect", "t5", "--plan"]) == 0
    printed = capsys.readouterr().out
    # both read what the encoder puts out
    assert "layer.1.EncDecAttention.k, layer.1.EncDecAttention.v" in printed
    for word in ("encoder_hidden_states", "encoder_decoder_position_bias", "shared.weight"):
        assert word in printed
    assert cli.main(["inspect", "merged", "--plan"]) == 0
    assert "sites of the last block" in capsys.readouterr().out  # q's class token alone counts


def test_inspect_of_a_model_that_does_not_run_without_weights_says_so_and_goes_on(models, capsys):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    layers = {"conv_dim": (4,) * 2, "conv_stride": (5, 2), "conv_kernel": (10, 3)}
    config = tf.Wav2Vec2Config(**sizes, **layers, intermediate_size=64)
    save_model(tf.Wav2Vec2Model(config), models / "sound")
    assert cli.main(["inspect", "sound", "--plan"]) == 0
    printed = capsys.readouterr().out
    assert "sites: unknown" in printed and "no NaN" in printed


def test_every_command_that_reports_does_so_in_json_too(models, capsys):
    content = partial(told, capsys)
    assert content(*MERGE[:-1], "fused")["method"] == "task_arithmetic"
    assert [block["name"] for block in content(*CALIBRATE)["blocks"]] == ["vision.00", "vision.01"]
    assert content("plan", *CALIBRATE[1:9])["host_bytes"] > 0
    inspected = content("inspect", "new", "--plan")
    assert inspected["calibration"]["stacks"][0]["blocks"] == 2
    assert inspected["stored_as"] == {"float32": inspected["tensors"]}
    made = {"folder": "an other", "form": "open_clip"}
    assert content("convert", "base", "--out", "an other") == made
    assert "featcal convert 'an other' --out" in refused(["inspect", "an other"], models, capsys)
    evaluated = content(*EVALUATE, "--template", "a photo of a {}")
    assert evaluated["tasks"]["mnist"]["images"] == 6 and 0 <= evaluated["average"] <= 100
    assert "python" in content("doctor")["machine"]


def test_quiet_prints_results_and_colours_need_a_terminal(models, capfd):
    assert cli.main(CALIBRATE) == 0
    printed = capfd.readouterr()
    assert "vision.01" in printed.err and "calibrated model: new" in printed.out
    assert not [sign for sign in ("\x1b", "\r", "%|") if sign in printed.err + printed.out]
    assert cli.main(["--quiet", *CALIBRATE, "--force"]) == 0
    printed = capfd.readouterr()
    assert printed.err == "" and "calibrated model: new" in printed.out
    output.show_progress(True)


CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. Of the allocated memory 70 GiB is ours."


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(CUDA), MemoryError()])
def test_no_memory_is_one_message_and_nothing_half_written(models, capsys, monkeypatch, error):
    monkeypatch.setattr(torch.linalg, "cholesky_ex", Mock(side_effect=error))
    message = refused(CALIBRATE, models, capsys)
    assert "not enough memory" in message and "--set batch=8" in message


def test_a_disk_that_is_full_at_the_end_leaves_no_half_of_a_folder(models, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "write_json", Mock(side_effect=OSError(errno.ENOSPC, "")))
        assert cli.main(CALIBRATE) == cli.MISTAKE and not Path("new").exists()
    assert "new: no space left" in capsys.readouterr().err and cli.main(CALIBRATE) == 0


def test_another_fault_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("featcal.cli.inputs.model_folder", Mock(side_effect=RuntimeError("bug")))
    with pytest.raises(RuntimeError, match="bug"):
        cli.main(["inspect", "anything"])
