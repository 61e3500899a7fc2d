"""The command line on tiny models: every mistake is one message, exit code 2, nothing written."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from PIL import Image

from featcal.cli import main as cli
from featcal.cli import options, start
from featcal.models.load import load_clip, load_tokenizer, load_vision
from tests import checkpoints

CLASSES = ("cat", "dog", "ship")
# nine pictures to calibrate on, six to test on
PICTURES = {f"train/{name}": 3 for name in CLASSES} | {f"test/{name}": 2 for name in CLASSES}
WEIGHT = "encoder.layers.0.mlp.fc1.weight"


@pytest.fixture(scope="module")
def ready(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    checkpoints.clip_folder(folder / "base")
    for seed, task in enumerate(("mnist", "dtd"), start=1):
        checkpoints.vision_folder(folder / task, seed)
        checkpoints.pictures(folder / "images" / task, seed, PICTURES)
    shutil.copytree(folder / "mnist", folder / "merged")
    return folder


@pytest.fixture
def models(ready, tmp_path, monkeypatch) -> Path:
    shutil.copytree(ready, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


EXPERTS = ["--expert", "mnist=mnist", "--expert", "dtd=dtd"]
MERGE = ["merge", "task_arithmetic", "--base", "base", *EXPERTS, "--out", "new"]
DATA = ["--data", "mnist=images/mnist", "--data", "dtd=images/dtd"]
FEW = ["--samples", "6", "--batch", "3", "--preset", "paper"]
COMMON = ["--merged", "merged", "--base", "base"]
CALIBRATE = ["calibrate", *COMMON, *EXPERTS, *DATA, *FEW, "--out", "new"]
EVALUATE = ["evaluate", "--model", "merged", "--clip", "base", *DATA]


def tree(folder: Path) -> dict[str, bytes]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def refused(arguments: list[str], folder: Path, capsys) -> str:
    """Return the message of a command line that is refused and leaves the folder as it was."""
    before = tree(folder)
    assert cli.main(arguments) == cli.MISTAKE
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err and printed.err.count("featcal:") == 1
    assert tree(folder) == before, "something was written"
    return printed.err


def told(capsys, *arguments) -> dict:
    capsys.readouterr()
    assert cli.main(["--quiet", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_cells_of_the_page_on_python_run_as_they_stand_there(models, capsys):
    page = (Path(__file__).parents[2] / "book/python.md").read_text()
    (models / "models").mkdir()
    for name in ("base", "mnist", "dtd"):
        (models / name).rename(models / "models" / name)
    names: dict = {}
    for cell in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(cell.replace("samples=256", "samples=6").replace("samples=64", "samples=6"), names)
    assert len(names["result"].blocks) == 2
    assert (models / "models/calibrated_here/featcal.json").is_file()
    card = (models / "models/calibrated_here/README.md").read_text()
    assert "## Use" in card and "## Samples" not in card  # the command alone knows the samples
    assert "mnist calibrated" in capsys.readouterr().out


def test_evaluate_prints_the_share_of_images_whose_own_class_is_nearest(models, capsys):
    """The oracle asks CLIPModel itself, image by image against the prompts."""
    whole, tokenizer = load_clip("base"), load_tokenizer("base")
    prompts = [f"a photo of a {name}" for name in CLASSES]
    text, right = tokenizer(prompts, padding=True, return_tensors="pt"), 0
    for label, name in enumerate(CLASSES):
        opened = [Image.open(path) for path in sorted(Path("images/mnist/test", name).iterdir())]
        pixels = checkpoints.processor()(opened, return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            answers = whole(pixel_values=pixels, **text).logits_per_image.argmax(1)
        right += int((answers == label).sum())
    arguments = "evaluate --model base --clip base --data mnist=images/mnist --template".split()
    assert cli.main([*arguments, "a photo of a {}"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mnist")]
    assert line.split() == ["mnist", "3", "6", f"{100 * right / 6:.2f}"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*MERGE, "--sclae", "0.3"], "--scale"),
        (["clibrate"], "calibrate"),
        (["merge", "averge", *MERGE[2:]], "METHOD: 'averge' is not known"),
        (MERGE[:-2], "--out"),
        ([*MERGE[:-1], "base/config.json/new"], "base/config.json"),
        ([*MERGE, "--expert", "mnist"], "NAME=MODEL"),
        ([*MERGE, "--expert", "mnist=dtd"], "second time"),
        ([*MERGE, "--scale", "0.3", "--set", "scale=0.2"], "second time"),
        ([*CALIBRATE, "--ridge", "0"], "calibrate.ridge: 0 cannot"),
        ([*CALIBRATE, "--set", "residul=1"], "'residual'"),
        ([*CALIBRATE, "--set", "norm"], "KEY=VALUE"),
        ([*CALIBRATE, "--quiet"], "before the command"),
        ([*CALIBRATE, "--data", "cars=images/dtd"], "cars"),
        (["fix", *COMMON[1:], *EXPERTS, *DATA, "--split", "val"], "or split, --split NAME"),
        ([*CALIBRATE, "--tokens", "5"], "tokens: 5 cannot be used; it is for texts"),
        ([*EVALUATE, "--template", "a photo"], "{}"),
        ([*EVALUATE, "--card", "--set", "split=trian"], "no card (README.md)"),
        (["evaluate", "--model", "merged", "--clip", "mnist", *DATA], "CLIPModel"),
        ([*CALIBRATE, "--set", "work=base/config.json"], "names a file"),
        ([*CALIBRATE, "--set", "work=base/waiting"], "lies in"),
        ([*CALIBRATE, "--set", "work=/proc/x"], "calibrate.work"),
        ([*CALIBRATE, "--out", "merged/new"], "lies inside"),
        ([*CALIBRATE[:-1], "/proc/x"], "/proc/x"),
        ([*EVALUATE, "--template", "a doodle of a {}"], "a doodle of a cat"),
        ([*MERGE[:-1], "mnist", "--force"], "a folder that is read"),
        ([*MERGE[:-1], ".", "--force"], "a folder that is read"),
        ([*MERGE[:-1], "images", "--force"], "not a model's folder"),
        (["inspect", "base/config.json"], "names a file"),
        (["inspect", "images"], "has a config.json"),
    ],
)
def test_a_mistake_in_the_arguments_is_one_message_that_names_it(models, capsys, arguments, said):
    assert said.lower() in refused(arguments, models, capsys).lower()


def test_names_made_of_digits_are_no_numbers():
    (one,) = options.read_set(["work=2024", "split=2024"], "calibrate", options.Running())
    assert (one.work, one.split) == (Path("2024"), "2024")


@pytest.mark.parametrize("command", [MERGE, CALIBRATE], ids=lambda words: words[0])
def test_an_existing_folder_is_only_replaced_with_force(models, capsys, command):
    shutil.copytree("dtd", "new")
    assert "--force" in refused(command, models, capsys)
    assert cli.main([*command, "--force"]) == 0
    new, old = (load_vision(name).state_dict()[WEIGHT] for name in ("new", "dtd"))
    assert not torch.equal(new, old)


def test_ctrl_c_ends_with_130_and_leaves_nothing_behind(models, capsys, monkeypatch):
    before, interrupted = tree(models), Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("featcal.models.load._write_safetensors", interrupted)
    assert cli.main(MERGE) == cli.INTERRUPTED
    assert "interrupted" in capsys.readouterr().err and tree(models) == before


def test_a_pipe_that_is_closed_early_is_no_bug(models):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "featcal", "inspect", "merged"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (cli.CLOSED, b"")


def test_a_terminal_may_be_narrow_and_without_unicode(models):
    command = "-m featcal compare --model a=merged --model b=merged".split()
    command = [sys.executable, *command, *DATA, *EXPERTS]
    narrow = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "30"}
    done = subprocess.run(command, env=narrow, capture_output=True, text=True, check=True)
    assert re.search(r"^dtd +b +\d+ ", done.stdout, re.M) and "drift ?" in done.stdout


PROGRAM = """
import atexit, os, runpy, sys
slow = {"torch", "transformers", "datasets"}
atexit.register(lambda: print(os.environ["OMP_WAIT_POLICY"], slow & {*sys.modules}))
runpy.run_module("featcal", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["fix", "-h"], 0, ""),
        ([*MERGE, "--expert", "cars=missing"], 2, "featcal: missing: no such file or folder"),
    ],
)
def test_as_a_program_help_and_mistakes_load_no_slow_packages(models, arguments, code, said):
    environment = {name: value for name, value in os.environ.items() if name not in start.WAITING}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code and "Traceback" not in done.stderr
    assert done.stderr.startswith(said) and done.stdout.endswith("PASSIVE set()\n")


@pytest.mark.parametrize(
    ("quota", "count"), [("150000 100000", "2"), ("max 100000", None), (None, None)]
)
def test_threads_sleep_and_a_container_limits_their_number(quota, count, tmp_path, monkeypatch):
    if quota:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(start, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "environ", {"OMP_WAIT_POLICY": "ACTIVE"})
    start.share_machine()
    assert os.environ.get("OMP_NUM_THREADS") == count
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE" and os.environ["KMP_BLOCKTIME"] == "0"
