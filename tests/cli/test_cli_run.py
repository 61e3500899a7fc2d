"""Dry runs, logs, JSON and progress; options as arguments of the library; what inspect shows."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from test_cli import CALIBRATE, EVALUATE, MERGE, WEIGHT, models, ready, refused, tree

from featcal.cli import main as cli
from featcal.cli import terminal
from featcal.models.checkpoint import LazyCheckpoint
from tests import checkpoints


def test_a_dry_run_checks_prints_what_is_needed_and_writes_nothing(models, capsys, monkeypatch):
    monkeypatch.setattr(
        "featcal.calibration.calibrate.calibrate", lambda *_, **__: pytest.fail("computed")
    )
    before = tree(models)
    assert cli.main([*CALIBRATE, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert tree(models) == before and "mnist" in printed and "nothing was computed" in printed
    assert cli.main([*CALIBRATE, "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["drawn"]["dtd"] == {"samples": 6, "longest": 0} and told["needs"]["host_bytes"] > 0


def test_a_dry_run_finds_what_a_run_would_stumble_over(models, capsys):
    assert "at most 9" in refused([*CALIBRATE, "--dry-run", "--samples", "10"], models, capsys)
    whole = LazyCheckpoint(models / "dtd").tensor(WEIGHT)
    for broken in (torch.zeros(48, 32), None, torch.full((64, 32), float("nan"))):
        checkpoints.with_tensors(models / "dtd", {WEIGHT: broken})
        assert WEIGHT in refused([*CALIBRATE, "--dry-run"], models, capsys)
    checkpoints.with_tensors(
        models / "dtd", {WEIGHT: whole, "encoder.layers.0.more.weight": torch.zeros(2)}
    )
    assert "more.weight" in refused([*CALIBRATE, "--dry-run"], models, capsys)


def test_a_disk_without_room_is_told_before_the_work(models, capsys, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    monkeypatch.setattr(
        "featcal.calibration.calibrate.calibrate", lambda *_, **__: pytest.fail("computed")
    )
    for command in (CALIBRATE, [*CALIBRATE, "--dry-run"], [*MERGE[:-1], "elsewhere"]):
        assert "1000 B" in refused(command, models, capsys)


def test_a_work_folder_that_vanishes_is_one_message(models, capsys, monkeypatch):
    import shutil

    from featcal.calibration.resume import RunFolder

    def gone(self, *_):
        shutil.rmtree(self.path)
        return keep(self, *_)

    keep = RunFolder.keep
    monkeypatch.setattr(RunFolder, "keep", gone)
    assert cli.main(CALIBRATE) == cli.MISTAKE
    said = capsys.readouterr().err
    assert (
        said.count("featcal:") == 1
        and ".new.unfinished" in said
        and "start the same run again" in said
    )


def test_a_log_file_tells_every_block_and_what_went_wrong(models, capsys):
    import logging

    before = logging.getLogger().handlers[:]
    assert cli.main(["--log-file", "run.log", *CALIBRATE]) == 0
    assert cli.main(["--log-file", "run.log", *CALIBRATE]) == cli.MISTAKE
    assert cli.main(["--log-file", "run.log", "--log-level", "lots", *CALIBRATE]) == cli.MISTAKE
    text = (models / "run.log").read_text()
    assert "INFO featcal: vision.01" in text and "ERROR featcal: --out" in text
    for handler in [h for h in logging.getLogger().handlers if h not in before]:
        logging.getLogger().removeHandler(handler)


def test_options_are_keywords_of_the_library(models, monkeypatch):
    from pathlib import Path

    import featcal
    from featcal.calibration.report import Result

    taken = {}

    def calibrate(merged, **given):
        taken.update(given)
        return Result(None, Path("new"), [])

    monkeypatch.setattr(featcal, "calibrate", calibrate, raising=False)
    (models / "new").mkdir()  # where the card goes
    monkeypatch.setattr("featcal.cli.calibrate.new_folder", lambda *_: None)
    kept = {"dtype": torch.float32, "host_memory": None, "work": None, "resume": True}
    assert cli.main(CALIBRATE) == 0
    assert kept.items() <= taken.items() and taken["settings"] == "auto"
    assert cli.main([*CALIBRATE, "--preset", "paper"]) == 0
    assert taken["settings"] == featcal.Calibration()
    more = (
        "--dtype bfloat16 --host-memory 1.5GiB --set work=w --set resume=false --set residual=0,1"
    )
    assert cli.main([*CALIBRATE, *more.split(), "--set", "modules=fc1", "--ridge", "1e-3"]) == 0
    kept = {"dtype": torch.bfloat16, "host_memory": 3 * 2**29, "work": Path("w"), "resume": False}
    assert kept.items() <= taken.items()
    chosen = featcal.Calibration(ridge=1e-3, residual=(0.0, 1.0), modules=("fc1",))
    assert taken["settings"] == chosen
    assert cli.main([*CALIBRATE, "--preset", "auto", "--ridge", "1e-3"]) == 2


def test_calibrate_has_at_most_20_options_and_help_names_every_setting(capsys):
    from featcal.settings import Calibration

    assert len(cli.load_command("calibrate").params) <= 20
    assert cli.main(["calibrate", "--help"]) == 0
    printed = capsys.readouterr().out
    own = ("ridge", "anchor_blend", "interpolation")
    named = (
        f"--{key.replace('_', '-')}" if key in own else key for key in Calibration.model_fields
    )
    assert all(name in printed for name in named)


def test_inspect_tells_sites_what_blocks_exchange_and_what_stays_as_it_is(
    models, capsys, monkeypatch
):
    import language

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(terminal.output, "_width", 200, raising=False)
    language.folder(models / "t5", "t5")
    assert cli.main(["inspect", "t5", "--plan"]) == 0
    printed = capsys.readouterr().out
    assert (
        "layer.1.EncDecAttention.k, layer.1.EncDecAttention.v" in printed
    )  # both read what the encoder puts out
    assert (
        "encoder_hidden_states" in printed
        and "encoder_decoder_position_bias" in printed
        and "shared.weight" in printed
    )
    assert cli.main(["inspect", "merged", "--plan"]) == 0
    assert (
        "sites of the last block" in capsys.readouterr().out
    )  # where only the class token counts for q


def test_inspect_of_a_model_that_cannot_be_thought_through_says_so_and_goes_on(models, capsys):
    import transformers

    from featcal.models.save import save_model

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "num_conv_pos_embeddings": 4,
    }
    sound = transformers.Wav2Vec2Config(
        **sizes,
        conv_dim=(4,) * 2,
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embedding_groups=2,
    )
    save_model(transformers.Wav2Vec2Model(sound), models / "sound")
    assert cli.main(["inspect", "sound", "--plan"]) == 0
    printed = capsys.readouterr().out
    assert "sites: unknown" in printed and "no NaN" in printed
    few = ["--expert", "a=sound", "--data", "a=images/dtd", "--samples", "6", "--out", "new"]
    assert "Wav2Vec2Model: it takes" in refused(
        ["calibrate", "--merged", "sound", "--base", "sound", *few], models, capsys
    )


def test_every_command_that_reports_does_so_in_json_too(models, capsys):
    def told(*arguments):
        assert cli.main(["--quiet", *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert told(*MERGE[:-1], "fused")["method"] == "task_arithmetic"
    assert [block["name"] for block in told(*CALIBRATE)["blocks"]] == ["vision.00", "vision.01"]
    plan = [part for part in CALIBRATE[:9] if part != "calibrate"]
    assert told("plan", *plan)["host_bytes"] > 0
    inspected = told("inspect", "new", "--plan")
    assert inspected["calibration"]["stacks"][0]["blocks"] == 2 and inspected["stored_as"] == {
        "float32": inspected["tensors"]
    }
    assert told("convert", "base", "--out", "other") == {"folder": "other", "form": "open_clip"}
    evaluated = told(*EVALUATE, "--template", "a photo of a {}")
    assert evaluated["tasks"]["mnist"]["images"] == 6 and 0 <= evaluated["average"] <= 100
    assert "python" in told("doctor")["machine"]


def test_quiet_prints_results_alone(models, capfd):
    assert cli.main(["--quiet", *CALIBRATE]) == 0
    told = capfd.readouterr()
    assert told.err == "" and "calibrated model: new" in told.out


def test_colours_and_bars_need_a_terminal(models, capsys):
    assert cli.main(CALIBRATE) == 0
    told = capsys.readouterr()
    assert "vision.01" in told.err and "calibrated model: new" in told.out
    assert not [sign for sign in ("\x1b", "\r", "%|") if sign in told.err + told.out]


SPEAKING = """
from featcal.cli.terminal import complain, progress_bar, say, table
say("result")
table("title", ["a"], [["1"]])
with progress_bar(1, "working") as piece:
    piece("piece")
complain("mistake")
"""


def test_of_several_processes_only_the_first_prints_and_each_tells_its_own_mistake():
    said = {}
    for rank in ("0", "1"):
        environment = os.environ | {"RANK": rank}
        said[rank] = subprocess.run(
            [sys.executable, "-c", SPEAKING],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
    assert (
        "result" in said["0"].stdout
        and "piece  (1 of 1)" in said["0"].stderr
        and "featcal: mistake" in said["0"].stderr
    )
    assert said["1"].stdout == "" and said["1"].stderr == "featcal (process 1): mistake\n"
