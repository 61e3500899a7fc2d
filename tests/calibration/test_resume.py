"""A calibration that is killed continues after the last solved block and writes the same bytes."""

import os
import shutil
import signal
from functools import partial
from pathlib import Path

import families
import processes
import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import PAPER, clip, images

from featcal import calibrate, files
from featcal.calibration import choose
from featcal.calibration.scratch import RunFolder
from featcal.cli.inputs import Inputs, whole_experts
from featcal.errors import BadBatches, BadFile, BadSetting
from featcal.models.load import save_model


def experiment():
    return tiny.experiment(torch.float32, build=partial(clip, num_hidden_layers=4))


def killed_after(monkeypatch, blocks, out, given, settings=PAPER):
    """Run until that many blocks are solved; an interrupt stands for SIGKILL."""
    keep, kept = RunFolder.keep, []

    def keep_some(self, name, *rest):
        keep(self, name, *rest)
        kept.append(name)
        if len(kept) == blocks:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunFolder, "keep", keep_some)
        calibrate(**given, settings=settings, out=out)


def finished(out, given, settings=PAPER, **more):
    """Run to the end: the bytes of the folder, and which blocks were solved before."""
    lines = []
    result = calibrate(**{"settings": settings, "progress": lines.append, **more, **given}, out=out)
    resumed = [line.endswith("(solved before)") for line in lines]
    return {p.name: p.read_bytes() for p in result.folder.iterdir()}, resumed


def several_stacks(family):
    return lambda: families.experiment(families.FAMILIES[family], torch.float32)


def with_a_choice():
    return tiny.experiment(torch.float32, tasks=["a", "b"], count=16, batch=8)


# the experiment, its settings, and after how many blocks it is killed
KILLED = {
    "stale": (experiment, PAPER.but(order="stale"), [1]),
    "forward": (experiment, PAPER, [3, 4]),
    "beyond": (experiment, PAPER.but(order="sites", residual=0.5, affine="joint"), [2]),
    "t5": (several_stacks("t5"), PAPER, [1, 2, 3]),
    "clip": (several_stacks("clip"), PAPER, [1, 2, 3]),
    "candidates": (with_a_choice, "auto", [2]),  # of two candidates the first block
    "choice": (with_a_choice, "auto", [5]),  # of the last calibration the first block
}


@pytest.mark.parametrize("case", KILLED)
def test_killed_run_resumes_with_the_same_bytes(case, tmp_path, monkeypatch):
    few = {"paper": PAPER, "stream": choose.STREAM.but(anchor_blend=2.0)}
    monkeypatch.setattr(choose, "CANDIDATES", few)
    given, settings, kills = KILLED[case]
    undisturbed, _ = finished(tmp_path / "whole", given(), settings)
    for blocks in kills:
        killed_after(monkeypatch, blocks, tmp_path / "out", given(), settings)
        assert not (tmp_path / "out").exists()
        again, resumed = finished(tmp_path / "out", given(), settings)
        before = {"candidates": 1, "choice": 3}.get(case, blocks)
        assert again == undisturbed and resumed == [n < before for n in range(4)]
        assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]
        shutil.rmtree(tmp_path / "out")


def with_another_record(file):
    with safe_open(file, framework="pt") as opened:
        record = opened.metadata()
    record["record"] = record["record"].replace("vision.01", "vision.11")
    save_file(load_file(file), file, metadata=record)


DAMAGES = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-9]),
    "altered": lambda file: file.write_bytes(file.read_bytes()[:-3] + b"abc"),
    "emptied": lambda file: file.write_bytes(b""),
    "of another kind": lambda file: save_file({"x": torch.zeros(2)}, file),
    "with another record": with_another_record,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_block_is_solved_again(tmp_path, monkeypatch, damage):
    undisturbed, _ = finished(tmp_path / "whole", experiment())
    killed_after(monkeypatch, 3, tmp_path / "out", experiment())
    DAMAGES[damage](tmp_path / ".out.unfinished/blocks/vision.01.safetensors")
    assert finished(tmp_path / "out", experiment()) == (undisturbed, [True, False, True, False])


def test_blocks_that_vanish_before_the_end_are_one_error(tmp_path, monkeypatch):
    def vanishing(run, name, *rest):
        if name == "vision.02":
            shutil.rmtree(run.path / "blocks")
        keep(run, name, *rest)

    given, keep = experiment(), RunFolder.keep
    given["merged"] = save_model(given["merged"], tmp_path / "merged")
    with monkeypatch.context() as patch, pytest.raises(BadFile, match=r"lost block vision\.0[01]"):
        patch.setattr(RunFolder, "keep", vanishing)
        finished(tmp_path / "out", given)
    assert finished(tmp_path / "out", given)[1] == [False, False, True, True]


def test_a_process_that_writes_no_blocks_bears_that_the_folder_vanishes(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "rglob", None)  # it fails while another process removes the folder
    with whole_experts(Inputs(tmp_path, tmp_path, {}), tmp_path, ()), RunFolder(tmp_path, False):
        pass


def every_token_is(value):
    return lambda module, last, shape: torch.full(shape, value)


CHANGES = {
    "model": lambda run: run["experts"].update(dtd=tiny.shifted(run["experts"]["dtd"], 5, 1e-3)),
    "batches": lambda run: run["batches"].update(svhn=images(7, dtype=torch.float32)),
    "settings": lambda run: run.update(settings=PAPER.but(ridge=0.06)),
    "token_weights": lambda run: run.update(token_weights=lambda m, last, shape: torch.ones(shape)),
    "not wanted": lambda run: run.update(resume=False),
    "weights of a folder": lambda given: save_model(  # its files keep their sizes
        tiny.shifted(experiment()["base"], 3, 1e-3), given["base"]
    ),
    "captured by token_weights": lambda run: run.update(token_weights=every_token_is(2.0)),
    # as of rotations, of which no parameter tells
    "config": lambda run: setattr(run["base"].config, "attention_dropout", 0.5),
    "a switch": lambda run: run["batches"]["svhn"][0].update(interpolate_pos_encoding=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_solved_blocks_of_another_run_are_not_used(tmp_path, monkeypatch, change):
    given = experiment()
    given["batches"]["svhn"][0]["interpolate_pos_encoding"] = False
    if change == "weights of a folder":
        given["base"] = save_model(given["base"], tmp_path / "base")
    elif change == "captured by token_weights":
        given["token_weights"] = every_token_is(1.0)
    killed_after(monkeypatch, 2, tmp_path / "out", given)
    CHANGES[change](given)
    undisturbed, _ = finished(tmp_path / "whole", given)
    assert finished(tmp_path / "out", given) == (undisturbed, [False] * 4)


def killing_itself(_, rank, world, port, folder):
    def kill(line):
        if line.startswith("vision.01"):
            os.kill(os.getpid(), signal.SIGKILL)

    own = {"out": folder / "out", "work": folder / "work", "host_memory": 0, "progress": kill}
    calibrate(**experiment(), settings=PAPER, **own)


def test_sigkill_leaves_only_what_resuming_needs(tmp_path):
    out, work = tmp_path / "out", tmp_path / "work"
    assert processes.run(killing_itself, None, 1, tmp_path) == [-signal.SIGKILL]
    assert not out.exists() and len(list((work / ".out.unfinished/blocks").iterdir())) == 2
    undisturbed, _ = finished(tmp_path / "whole", experiment())
    again, resumed = finished(out, experiment(), work=work, host_memory=0)
    assert again == undisturbed and resumed == [True, True, False, False]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_a_work_folder_that_was_there_and_other_files_in_it_stay(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    finished(tmp_path / "out", experiment(), work=tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "out"]
    killed_after(monkeypatch, 1, tmp_path / "empty/out", experiment())
    monkeypatch.chdir(tmp_path / "empty")
    finished("out", experiment(), work=".")
    assert [path.name for path in Path().iterdir()] == ["out"]
    options = {"another folder than out": {"work": "out"}, "bytes": {"host_memory": "8GiB"}}
    for problem, option in options.items():
        with pytest.raises(BadSetting, match=problem):
            finished("out", experiment(), **option)


def test_two_runs_for_one_result_or_folder_and_empty_batches_leave_nothing(tmp_path, monkeypatch):
    for taken in ("work", "out"):
        with files.claimed(tmp_path / taken), pytest.raises(BadFile, match="another featcal"):
            finished(tmp_path / "out", experiment(), work=tmp_path / "work")

    def lock_late(file, lock=files.locked):  # the run that held it has just removed its file
        monkeypatch.setattr(files, "locked", lock)
        (tmp_path / ".out.lock").unlink()
        return lock(file)

    monkeypatch.setattr(files, "locked", lock_late)
    with files.claimed(tmp_path / "out"):
        assert (tmp_path / ".out.lock").exists()  # so that no further run can lock another one
    given = experiment()
    given["batches"]["dtd"] = []
    with pytest.raises(BadBatches, match="is empty"):
        finished(tmp_path / "out", given)
    assert list(tmp_path.iterdir()) == []
