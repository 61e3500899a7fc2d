"""Folders a user may give by mistake: one message that names the file and the way out, exit code 2,
nothing written.
"""

import errno
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from test_cli import CALIBRATE, EVALUATE, MERGE, models, ready, refused, tree  # noqa: F401 - two fixtures

from featcal.cli import main as cli
from featcal.cli import terminal
from tests import checkpoints

PROMPT = ["--template", "a photo of a {}"]


def with_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("command", "name", "value"),
    [
        ("calibrate", "hidden_size", "wide"),
        ("evaluate", "num_attention_heads", 3),
        ("inspect", "num_hidden_layers", "many"),
        ("calibrate", "hidden_act", "gelux"),
        ("evaluate", "architectures", 7),
        ("inspect", "architectures", None),
        ("calibrate", "architectures", ["CLIPVisonModel"]),
    ],
)
def test_a_configuration_of_which_no_model_can_be_made_is_named(
    models, capsys, command, name, value
):  # noqa: F811
    with_config(models / "merged", **{name: value})
    arguments = {
        "calibrate": CALIBRATE,
        "evaluate": [*EVALUATE, *PROMPT],
        "inspect": ["inspect", "merged", "--plan"],
    }[command]
    assert "merged/config.json" in refused(arguments, models, capsys)


@pytest.mark.parametrize("content", ["[1]", "{", "\xff\xfe"])
def test_a_configuration_that_is_no_json_mapping_is_named(models, capsys, content):  # noqa: F811
    (models / "merged/config.json").write_bytes(content.encode("latin-1"))
    assert "merged/config.json" in refused(CALIBRATE, models, capsys)


def test_a_file_given_as_a_folder_is_called_a_file(models, capsys):  # noqa: F811
    assert "names a file" in refused(["inspect", "base/config.json"], models, capsys)


@pytest.mark.parametrize(
    "arguments", [CALIBRATE, [*EVALUATE, *PROMPT]], ids=["calibrate", "evaluate"]
)
def test_a_device_that_does_not_exist_is_not_taken_for_the_cpu(models, capsys, arguments):  # noqa: F811
    assert "--device: 'tpu'" in refused([*arguments, "--device", "tpu"], models, capsys)


def test_a_model_that_is_not_as_wide_as_the_clip_s_tower_is_refused(models, capsys):  # noqa: F811
    from transformers import CLIPVisionConfig, CLIPVisionModel

    from featcal.models.save import save_model

    shutil.rmtree("merged")
    save_model(
        CLIPVisionModel(CLIPVisionConfig(**{**checkpoints.VISION, "hidden_size": 64})),
        "merged",
        like="base",
    )
    message = refused([*EVALUATE, *PROMPT], models, capsys)
    assert "merged" in message and "64" in message and "32" in message


def test_a_clip_without_its_tokenizer_is_refused_rather_than_given_another_one(models, capsys):  # noqa: F811
    (models / "base/tokenizer.json").unlink()
    assert "tokenizer.json" in refused([*EVALUATE, *PROMPT], models, capsys)


def test_prompts_with_words_the_tokenizer_lacks_are_refused_because_their_accuracy_would_be_chance(
    models, capsys
):  # noqa: F811
    message = refused([*EVALUATE, "--template", "a doodle of a {}"], models, capsys)
    assert "a doodle of a cat" in message and "--template" in message


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENAMETOOLONG])
def test_a_path_that_cannot_be_written_is_one_message(models, capsys, monkeypatch, number):  # noqa: F811
    def refuse(path, *_, **__):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert os.strerror(number).lower() in refused(MERGE, models, capsys)


@pytest.mark.parametrize("command", [MERGE, CALIBRATE, ["convert", "base"]])
def test_a_link_to_nothing_is_refused_as_out_at_once(models, capsys, command):  # noqa: F811
    Path("link").symlink_to("nowhere")
    Path("loop").symlink_to("loop")
    for link in ("link", "loop"):
        assert "is a link to" in refused([*command, "--out", link], models, capsys)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_real_ctrl_c_in_the_middle_of_calibration_ends_with_130_and_the_same_command_goes_on(
    models, capsys, monkeypatch, sent
):  # noqa: F811
    def told(*words, **more):
        say(*words, **more)
        if "drift" in str(words[0]):
            signal.raise_signal(sent)

    before, say = tree(models), terminal.progress.print
    ignored = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # what a shell starts in the background hears no Ctrl-C
    with monkeypatch.context() as patched:
        patched.setattr(terminal.progress, "print", told)
        assert cli.main(CALIBRATE) == cli.INTERRUPTED
    signal.signal(signal.SIGINT, ignored)
    said = capsys.readouterr().err
    assert "vision.00" in said and "vision.01" not in said
    assert "the same command continues" in said and "Traceback" not in said
    left = tree(models).keys() - before.keys()
    assert ".new.unfinished/blocks/vision.00.safetensors" in left
    assert all(name.startswith(".new.unfinished/") for name in left)
    assert cli.main(CALIBRATE) == 0
    assert "(solved before)" in capsys.readouterr().err
    assert all(name.startswith("new/") for name in tree(models).keys() - before.keys())
