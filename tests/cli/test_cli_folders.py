"""Damaged or unsuitable folders: one message that names the file, exit code 2, nothing written."""

import errno
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from test_cli import CALIBRATE, EVALUATE, MERGE, WEIGHT, models, ready, refused, tree
from transformers import CLIPVisionConfig, CLIPVisionModel

from featcal.cli import main as cli
from featcal.cli import output, start
from featcal.models.checkpoint import LazyCheckpoint
from featcal.models.load import save_model
from tests import checkpoints

EVALUATE = [*EVALUATE, "--template", "a photo of a {}"]
CONVERT = ["convert", "base", "--out", "new"]
FOLDERS = ("base", "mnist", "dtd", "merged")


def config(folder, **changes):
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weight(folder, change):
    checkpoint = LazyCheckpoint(Path(folder))
    name = next(name for name in checkpoint if name.endswith(WEIGHT))
    checkpoints.with_tensors(Path(folder), {name: change(checkpoint[name].read().clone())})


def shard_outside(shard):
    Path("dtd/model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(LazyCheckpoint(Path("mnist")), shard)}
    Path("dtd/model.safetensors.index.json").write_text(json.dumps(index))


def wider():
    shutil.rmtree("merged")
    sizes = {**checkpoints.VISION, "hidden_size": 64}
    save_model(CLIPVisionModel(CLIPVisionConfig(**sizes)), "merged", like="base")


@pytest.mark.parametrize(
    ("damage", "commands", "said"),
    [
        (lambda: change_weight("dtd", lambda _: torch.zeros(48, 32)), [MERGE, CALIBRATE], ["dtd", WEIGHT]),
        (lambda: change_weight("dtd", lambda w: w.masked_fill(w == w.max(), float("nan"))), [MERGE, CALIBRATE], ["dtd", WEIGHT, "NaN"]),
        (lambda: os.truncate("dtd/model.safetensors", 9999), [MERGE, CALIBRATE], ["dtd/model.safetensors"]),
        (
            lambda: [change_weight(f, lambda w: torch.ones(64, 32, dtype=torch.int8)) for f in FOLDERS],
            [MERGE, CALIBRATE], [WEIGHT, "stored as int8", "quantised"],
        ),
        (lambda: config("mnist", quantization_config={"quant_method": "gptq"}), [MERGE, CALIBRATE], ["mnist/config.json"]),
        (lambda: shard_outside("../mnist/model.safetensors"), [MERGE, CALIBRATE, ["inspect", "dtd"]], ["index.json"]),
        (lambda: shard_outside(str(Path("mnist/model.safetensors").resolve())), [MERGE], ["index.json"]),
        (lambda: config("merged", hidden_size="wide"), [CALIBRATE], ["merged/config.json"]),
        (lambda: config("merged", num_attention_heads=3), [EVALUATE], ["merged/config.json"]),
        (lambda: config("merged", hidden_act="gelux"), [CALIBRATE], ["merged/config.json"]),
        (lambda: config("merged", architectures=None), [EVALUATE, ["inspect", "merged", "--plan"]], ["merged/config.json"]),
        (lambda: config("merged", architectures=["CLIPVisonModel"]), [CALIBRATE], ["merged/config.json"]),
        (lambda: Path("merged/config.json").write_text("[1]"), [CALIBRATE], ["merged/config.json"]),
        (lambda: Path("merged/config.json").write_text("{"), [CALIBRATE], ["merged/config.json"]),
        (lambda: Path("merged/config.json").write_bytes(b"\xff\xfe"), [CALIBRATE], ["merged/config.json"]),
        (lambda: Path("base/preprocessor_config.json").write_text("{"), [CALIBRATE, EVALUATE, CONVERT], ["preprocessor_config.json"]),
        (lambda: shutil.copy("images/mnist/test/cat/000.png", "images/mnist/test"), [EVALUATE], ["images/mnist/test", "class folder"]),
        (lambda: [shutil.rmtree("images/dtd/train"), Path("images/dtd/train").mkdir()], [CALIBRATE], ["images/dtd", "holds no"]),
        (lambda: [p.rename(p.with_suffix(".heic")) for p in Path("images/dtd/train").rglob("*.png")], [CALIBRATE], ["such as", ".heic", "holds no"]),
        (wider, [EVALUATE], ["merged", "64", "32"]),
        (lambda: Path("base/tokenizer.json").unlink(), [EVALUATE], ["tokenizer.json"]),
    ],
)  # fmt: skip
def test_damage_is_one_message_that_names_the_file(models, capsys, damage, commands, said):
    damage()
    for command in commands:
        message = refused(command, models, capsys)
        assert not [word for word in said if word not in message]


SYSTEM = [PermissionError(errno.EACCES, "denied"), OSError(errno.ENAMETOOLONG, "too long")]
SYSTEM += [FileNotFoundError("not readable"), SafetensorError("too large (os error 27)")]


@pytest.mark.parametrize("error", SYSTEM)
def test_an_error_of_the_system_is_one_message(models, capsys, monkeypatch, error):
    monkeypatch.setattr(Path, "mkdir", Mock(side_effect=error))
    assert (getattr(error, "strerror", 0) or str(error)) in refused(MERGE, models, capsys)


@pytest.mark.parametrize("command", [MERGE, CALIBRATE, ["convert", "base"]])
def test_out_may_not_be_a_broken_link(models, capsys, command):
    for link, target in (("link", "nowhere"), ("loop", "loop")):
        Path(link).symlink_to(target)
        assert "is a link to" in refused([*command, "--out", link], models, capsys)


def test_out_may_be_the_current_folder(models, monkeypatch):
    monkeypatch.chdir("merged")
    given = "--base ../base --expert mnist=../mnist --expert dtd=../dtd --out . --force".split()
    assert cli.main(["merge", "average", *given]) == 0 and Path("featcal.json").is_file()
    assert tree(models / "merged") == tree(Path())


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_calibration_ends_with_130_and_continues(models, capsys, monkeypatch, sent):
    def interrupting(*words, **more):
        print_(*words, **more)
        if "drift" in str(words[0]):
            signal.raise_signal(sent)

    def again(*words, **more):
        complain(*words, **more)
        signal.raise_signal(sent)

    before, print_, complain = tree(models), output.progress.print, output.errors.print
    # a process started in the background by a shell ignores Ctrl-C
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    with monkeypatch.context() as patched:
        patched.setattr(output.progress, "print", interrupting)
        patched.setattr(output.errors, "print", again)
        patched.setattr(sys, "argv", ["featcal", *CALIBRATE])
        assert start.main() == cli.INTERRUPTED
        patched.setattr(cli, "main", lambda: 1 / 0)  # as by an import that the signal broke
        assert start.main() == cli.INTERRUPTED
    assert signal.getsignal(sent) is signal.SIG_IGN  # until the process has ended
    signal.signal(signal.SIGINT, ignored)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    message = capsys.readouterr().err
    assert "vision.00" in message and "vision.01" not in message
    assert "the same command continues" in message and "Traceback" not in message
    left = tree(models).keys() - before.keys()
    assert ".new.unfinished/blocks/vision.00.safetensors" in left
    assert all(name.startswith(".new.unfinished/") for name in left)
    assert cli.main(CALIBRATE) == 0 and "(solved before)" in capsys.readouterr().err
    assert all(name.startswith("new/") for name in tree(models).keys() - before.keys())
