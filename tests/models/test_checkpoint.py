"""Atomic writes, lazy checkpoints and the shard writer."""

import errno
import json
import os
import subprocess
import sys

import checkpoints
import pytest
import torch
from safetensors.torch import load_file, save_file

from featcal.errors import BadFile, DiskFull, MissingPath, MissingTensor, NotFinite, TruncatedFile
from featcal.files import atomic_folder, atomic_path
from featcal.models.checkpoint import LazyCheckpoint, all_finite
from featcal.models.save import shard_writer


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "b.weight": torch.randn(5, 3, generator=generator),
        "a.bias": torch.randn(7, generator=generator).to(torch.bfloat16),
        "count": torch.tensor(3),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 4),
    }


def written(folder, state, **options):
    with shard_writer(folder, **options) as shards:
        for name, tensor in state.items():
            shards.write(name, tensor)
    return folder


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x"), OSError(errno.EIO, "x")])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, error):
    target = tmp_path / "scores.csv"
    target.write_text("old")
    with pytest.raises(type(error)), atomic_path(target) as hidden:
        hidden.write_text("half")
        raise error
    assert target.read_text() == "old" and os.listdir(tmp_path) == ["scores.csv"]


def test_a_finished_folder_replaces_the_older_one_whole(tmp_path):
    for name in ("first", "second"):
        with atomic_folder(tmp_path / "model") as hidden:
            (hidden / name).write_text(name)
    assert os.listdir(tmp_path) == ["model"] and os.listdir(tmp_path / "model") == ["second"]


KILLED = """
import os, signal, sys
from featcal.files import atomic_folder
from featcal.models.save import shard_writer
with atomic_folder(sys.argv[1]) as place, shard_writer(place) as inside:
    (inside.folder / "half").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("name", ["model", "model.v2"])
def test_what_a_killed_process_left_is_removed_by_the_next_write_and_nothing_else(tmp_path, name):
    (tmp_path / name).mkdir()  # an older one
    subprocess.run([sys.executable, "-c", KILLED, tmp_path / name], check=False)
    left = {path.name for path in tmp_path.iterdir()} - {name}
    assert len(left) == 2 and all(path.startswith(".") for path in left)
    others = {f".{name}.unfinished", ".model2.7-0.part", "model.7-0.part"}
    for other in others:
        (tmp_path / other).mkdir()
    with atomic_folder(tmp_path / name) as mine, atomic_folder(tmp_path / name):
        assert mine.is_dir()  # the second leaves the first alone
    assert {path.name for path in tmp_path.iterdir()} == {name, *others}


@pytest.mark.parametrize("replaced", [True, False])
def test_an_older_folder_is_removed_only_once_it_is_replaced(tmp_path, replaced):
    """A process that dies between the two renames leaves only the older folder."""
    older = tmp_path / ".model.7-0.old"
    older.mkdir()
    if replaced:
        (tmp_path / "model").mkdir()
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "model"):
        raise KeyboardInterrupt
    assert older.exists() is not replaced


def test_a_full_disk_is_reported_with_the_final_path(tmp_path):
    with (
        pytest.raises(DiskFull, match="77 bytes") as error,
        atomic_folder(tmp_path / "out") as out,
        atomic_path(out / "model" / "config.json", 77),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert error.value.path == tmp_path / "out" / "model" / "config.json"
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fills_up_while_shards_are_joined_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("featcal.models.save.shutil.copyfileobj", full)
    with pytest.raises(DiskFull, match="model"):
        written(tmp_path / "model", tensors())
    assert os.listdir(tmp_path) == []


def test_only_folders_of_models_are_replaced(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").write_text("mine")
    for taken in (tmp_path / "notes/a.txt", tmp_path / "notes"):
        with pytest.raises(BadFile, match="name a new folder"):
            written(taken, tensors())
    assert (tmp_path / "notes/a.txt").read_text() == "mine"
    assert written(written(tmp_path / "model", tensors()), tensors()).is_dir()


@pytest.mark.parametrize("limit", [10**9, 70, 1])
def test_written_tensors_are_read_back_by_safetensors_itself(tmp_path, limit):
    folder = written(tmp_path / "model", tensors(), limit=limit)
    back = {}
    for file in folder.glob("*.safetensors"):
        back |= load_file(file)
    assert back.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor)
    assert not (folder / ".spool").exists()
    assert (folder / "model.safetensors").exists() == (limit == 10**9)


def test_the_order_of_writing_does_not_change_the_bytes(tmp_path):
    written(tmp_path / "forward", tensors(), limit=70)
    written(tmp_path / "backward", dict(reversed(tensors().items())), limit=70)
    forward, backward = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
        for name in ("forward", "backward")
    )
    assert forward == backward and len(forward) > 2


def test_sharded_and_single_checkpoints_read_the_same(tmp_path):
    single = LazyCheckpoint(written(tmp_path / "single", tensors()))
    sharded = LazyCheckpoint(written(tmp_path / "sharded", tensors(), limit=70))
    assert single.names == sharded.names == sorted(tensors())
    assert sharded.file_of("a.bias").name.startswith("model-0000")
    for name, tensor in tensors().items():
        for checkpoint in (single, sharded):
            assert torch.equal(checkpoint.tensor(name), tensor)
            assert checkpoint.shape(name) == tuple(tensor.shape)
            assert checkpoint.dtype(name) == tensor.dtype
            assert checkpoint.bytes(name) == tensor.nbytes


def test_legacy_whole_and_present_layouts_have_the_same_names_and_values(tmp_path):
    present = LazyCheckpoint(checkpoints.vision_folder(tmp_path / "present"))
    legacy = LazyCheckpoint(checkpoints.legacy_folder(tmp_path / "legacy"))
    tower = LazyCheckpoint(checkpoints.clip_folder(tmp_path / "whole"), part="vision_model")
    assert present.names == legacy.names == tower.names == sorted(checkpoints.vision().state_dict())
    assert all(torch.equal(present.tensor(n), legacy.tensor(n)) for n in present.names)
    assert all(torch.equal(present.tensor(n), tower.tensor(n)) for n in present.names)


def test_a_truncated_file_is_named_with_a_way_out(tmp_path):
    file = checkpoints.vision_folder(tmp_path / "model") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(
        TruncatedFile, match=r"model\.safetensors.*cut short[\s\S]*make or download"
    ):
        LazyCheckpoint(tmp_path / "model")


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 64])
def test_a_file_that_is_no_safetensors_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(TruncatedFile, match=r"model\.safetensors"):
        LazyCheckpoint(tmp_path)


def test_a_pickle_only_folder_is_refused_with_a_way_out(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(BadFile, match=r"pytorch_model\.bin is a pickle[\s\S]*save_pretrained"):
        LazyCheckpoint(tmp_path)


def test_missing_and_empty_folders_are_different_errors(tmp_path):
    with pytest.raises(MissingPath, match="nowhere"):
        LazyCheckpoint(tmp_path / "nowhere")
    with pytest.raises(BadFile, match="found: nothing"):
        LazyCheckpoint(tmp_path)


def test_a_missing_shard_a_wrong_index_and_a_broken_index_are_errors(tmp_path):
    folder = written(tmp_path / "model", tensors(), limit=70)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    wrong = index | {"weight_map": index["weight_map"] | {"ghost": index["weight_map"]["count"]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(wrong))
    with pytest.raises(MissingTensor, match="ghost"):
        LazyCheckpoint(folder)
    (folder / index["weight_map"]["count"]).unlink()
    with pytest.raises(MissingPath, match=index["weight_map"]["count"]):
        LazyCheckpoint(folder)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(BadFile, match=r"index\.json"):
        LazyCheckpoint(folder)


def test_nan_is_reported_with_file_and_tensor(tmp_path):
    tensors = {"good": torch.ones(2), "bad": torch.tensor([1.0, float("nan")])}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = LazyCheckpoint(tmp_path)
    assert torch.equal(checkpoint.finite_tensor("good"), torch.ones(2))
    with pytest.raises(NotFinite, match=r"model\.safetensors: bad"):
        checkpoint.finite_tensor("bad")
    with pytest.raises(NotFinite, match=r"model\.safetensors: bad"):
        checkpoint.check_finite()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_bytes_and_tensors_agree_on_what_is_finite(tmp_path, monkeypatch, dtype, wrong):
    extreme = [torch.finfo(dtype).max, torch.finfo(dtype).min, torch.finfo(dtype).tiny / 2, -0.0]
    good = torch.tensor(extreme * 25, dtype=dtype)
    bad = good.clone()
    bad[-1] = wrong
    state = {"good": good, "bad": bad, "none": good[:0], "count": torch.tensor(-1)}
    save_file(state, tmp_path / "model.safetensors")
    checkpoint = LazyCheckpoint(tmp_path)
    assert [name for name in checkpoint.names if not all_finite(checkpoint.tensor(name))] == ["bad"]
    with pytest.raises(NotFinite, match=r": bad holds"):
        checkpoint.check_finite()
