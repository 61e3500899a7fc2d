"""A calibration that is killed and started again: it goes on after the last solved block and writes
the same bytes.
"""

import os
import signal
from dataclasses import replace

import families
import processes
import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import PAPER, clip, images

from featcal import calibrate
from featcal.calibration import choose
from featcal.calibration.resume import RunFolder
from featcal.errors import BadBatches, BadFile, BadSetting
from featcal.files import claimed
from featcal.models.save import save_model

DEEP = {"num_hidden_layers": 4}


def deep(dtype):
    return clip(dtype=dtype, **DEEP)


def experiment(**more):
    return tiny.experiment(torch.float32, build=deep, **more)


class Killed(Exception):
    """Stands for SIGKILL inside one process."""


def killed_after(monkeypatch, blocks, out, given, settings=PAPER):
    """Run until that many blocks are solved."""
    keep, kept = RunFolder.keep, []

    def keep_some(self, name, *rest):
        keep(self, name, *rest)
        kept.append(name)
        if len(kept) == blocks:
            raise Killed

    monkeypatch.setattr(RunFolder, "keep", keep_some)
    with pytest.raises(Killed):
        calibrate(**given, settings=settings, out=out)
    monkeypatch.undo()


def finished(out, given, settings=PAPER, **more):
    """Run to the end: bytes of the folder, lines of progress, and how many blocks were solved
    anew.
    """
    lines = []
    result = calibrate(**given, settings=settings, out=out, progress=lines.append, **more)
    return {p.name: p.read_bytes() for p in result.folder.iterdir()}, lines


@pytest.mark.parametrize(("blocks", "order"), [(1, "stale"), (3, "forward"), (4, "forward")])
def test_killed_run_resumes_with_the_same_bytes(tmp_path, monkeypatch, blocks, order):
    settings = PAPER.but(order=order)
    undisturbed, _ = finished(tmp_path / "whole", experiment(), settings)
    killed_after(monkeypatch, blocks, tmp_path / "out", experiment(), settings)
    assert not (tmp_path / "out").exists()
    again, lines = finished(tmp_path / "out", experiment(), settings)
    assert again == undisturbed
    assert [line.endswith("(solved before)") for line in lines] == [n < blocks for n in range(4)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]


@pytest.mark.parametrize("blocks", [3, 6])  # among the candidates, and in the last calibration
def test_killed_choice_resumes_with_the_same_bytes(tmp_path, monkeypatch, blocks):
    few = {"paper": PAPER, "stream": choose.STREAM.but(anchor_blend=2.0)}
    monkeypatch.setattr(choose, "CANDIDATES", few)

    def given():
        return tiny.experiment(torch.float32, tasks=["a", "b"], count=16, batch=8)

    undisturbed, lines = finished(tmp_path / "whole", given(), "auto")
    with monkeypatch.context() as patch:
        killed_after(patch, blocks - 1, tmp_path / "out", given(), "auto")
    again, resumed = finished(tmp_path / "out", given(), "auto")
    assert again == undisturbed and len(resumed) == len(lines) == 4
    done = [line.endswith("(solved before)") for line in resumed]
    assert done == ([True, False, False, False] if blocks == 3 else [True, True, True, False])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]


@pytest.mark.parametrize("family", ["t5", "clip"])
def test_models_with_several_stacks_resume_anywhere(tmp_path, monkeypatch, family):
    def given():
        return families.experiment(families.FAMILIES[family], torch.float32)

    undisturbed, lines = finished(tmp_path / "whole", given())
    for blocks in range(1, len(lines)):
        killed_after(monkeypatch, blocks, tmp_path / "out", given())
        assert finished(tmp_path / "out", given())[0] == undisturbed


def cut(file):
    file.write_bytes(file.read_bytes()[:-9])


def altered(file):
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def emptied(file):
    file.write_bytes(b"")


def of_another_kind(file):
    save_file({"x": torch.zeros(2)}, file)


def with_another_record(file):
    tensors, record = load_file(file), read_record(file)
    record["record"] = record["record"].replace("vision.01", "vision.11")
    save_file(tensors, file, metadata=record)


def read_record(file):
    with safe_open(file, framework="pt") as opened:
        return opened.metadata()


@pytest.mark.parametrize("damage", [cut, altered, emptied, of_another_kind, with_another_record])
def test_damaged_block_is_solved_again(tmp_path, monkeypatch, damage):
    undisturbed, _ = finished(tmp_path / "whole", experiment())
    killed_after(monkeypatch, 3, tmp_path / "out", experiment())
    damage(tmp_path / ".out.unfinished/blocks/vision.01.safetensors")
    again, lines = finished(tmp_path / "out", experiment())
    assert again == undisturbed
    assert [line.endswith("(solved before)") for line in lines] == [True, False, True, False]


def test_block_missing_at_the_end_is_one_error(tmp_path, monkeypatch):
    given = experiment()
    given["merged"] = save_model(given["merged"], tmp_path / "merged")
    whole = RunFolder.keep
    monkeypatch.setattr(
        RunFolder, "keep", lambda run, name, *rest: name == "vision.02" or whole(run, name, *rest)
    )
    with pytest.raises(BadFile, match=r"lost block vision\.02.*\n.*start the same run again"):
        finished(tmp_path / "out", given)
    monkeypatch.undo()
    _, lines = finished(tmp_path / "out", given)
    assert [line.endswith("(solved before)") for line in lines] == [True, True, False, True]


def changed_model():
    given = experiment()
    given["experts"]["dtd"] = tiny.shifted(given["experts"]["dtd"], 5, 1e-3)
    return given


def changed_batches():
    given = experiment()
    given["batches"]["svhn"] = images(7, dtype=torch.float32)
    return given


@pytest.mark.parametrize("change", ["model", "batches", "settings", "token_weights", "not wanted"])
def test_solved_blocks_of_another_run_are_not_used(tmp_path, monkeypatch, change):
    killed_after(monkeypatch, 2, tmp_path / "out", experiment())
    given, settings, more = experiment(), PAPER, {}
    if change == "model":
        given = changed_model()
    elif change == "batches":
        given = changed_batches()
    elif change == "settings":
        settings = PAPER.but(ridge=0.06)
    elif change == "token_weights":
        more = {"token_weights": lambda module, last, shape: torch.ones(shape)}
    else:
        more = {"resume": False}
    undisturbed, _ = finished(tmp_path / "whole", given, settings, **more)
    again, lines = finished(tmp_path / "out", given, settings, **more)
    assert again == undisturbed and not any("solved before" in line for line in lines)


def test_a_changed_weight_file_of_the_same_size_is_another_run(tmp_path, monkeypatch):
    given = experiment()
    given["base"] = save_model(given["base"], tmp_path / "base")
    killed_after(monkeypatch, 2, tmp_path / "out", given)
    save_model(tiny.shifted(deep(torch.float32), 3, 1e-3), tmp_path / "base")
    assert not any("solved before" in line for line in finished(tmp_path / "out", given)[1])


def killing_itself(_, rank, world, port, folder):
    """In a process of its own."""

    def kill(line):
        if line.startswith("vision.01"):
            os.kill(os.getpid(), signal.SIGKILL)

    calibrate(
        **experiment(),
        settings=PAPER,
        out=folder / "out",
        work=folder / "work",
        host_memory=0,
        progress=kill,
    )


def test_sigkill_leaves_only_what_resuming_needs(tmp_path):
    out, work = tmp_path / "out", tmp_path / "work"
    assert processes.run(killing_itself, None, 1, tmp_path) == [-signal.SIGKILL]
    assert not out.exists() and len(list((work / "blocks").iterdir())) == 2
    undisturbed, _ = finished(tmp_path / "whole", experiment())
    again, lines = finished(out, experiment(), work=work, host_memory=0)
    assert again == undisturbed and sum("solved before" in line for line in lines) == 2
    assert not work.exists()


def test_two_runs_with_one_result_or_in_one_folder_are_refused(tmp_path):
    with (
        RunFolder(tmp_path / "work"),
        pytest.raises(BadSetting, match="in use by another calibration"),
    ):
        finished(tmp_path / "out", experiment(), work=tmp_path / "work")
    with claimed(tmp_path / "out"), pytest.raises(BadFile, match="another featcal process"):
        finished(tmp_path / "out", experiment(), work=tmp_path / "elsewhere")
    assert [path.name for path in tmp_path.iterdir()] == []


def test_a_run_that_fails_before_its_first_block_leaves_nothing(tmp_path):
    given = experiment()
    given["batches"]["dtd"] = []
    with pytest.raises(BadBatches, match="is empty"):
        finished(tmp_path / "out", given)
    assert list(tmp_path.iterdir()) == []
