"""Checkpoint folders of every layout are read, and what is wrong with one is named."""

import json

import checkpoints
import pytest
import torch
from safetensors.torch import save_file
from test_save import TENSORS, written

from featcal.errors import BadFile, MissingPath, MissingTensor, NotFinite, TruncatedFile
from featcal.models.checkpoint import LazyCheckpoint, all_finite


def test_sharded_and_single_checkpoints_read_the_same(tmp_path):
    single = LazyCheckpoint(written(tmp_path / "single"))
    sharded = LazyCheckpoint(written(tmp_path / "sharded", limit=70))
    assert list(single) == list(sharded) == sorted(TENSORS)
    assert sharded["a.bias"].file.name.startswith("model-0000")
    for name, tensor in TENSORS.items():
        for checkpoint in (single, sharded):
            lazy, read = checkpoint[name], checkpoint[name].read()
            assert torch.equal(read, tensor) and read.untyped_storage().nbytes() == tensor.nbytes
            assert (lazy.shape, lazy.dtype) == (tuple(tensor.shape), tensor.dtype)
            assert lazy.nbytes == tensor.nbytes
    with open("/proc/self/maps") as maps:
        assert str(tmp_path) not in maps.read()  # mapped pages count as memory of this process


def test_legacy_whole_and_present_layouts_have_the_same_names_and_values(tmp_path):
    expected = checkpoints.vision().state_dict()
    for layout in ("vision_folder", "legacy_folder", "clip_folder"):
        folder = getattr(checkpoints, layout)(tmp_path / layout)
        tower = LazyCheckpoint(folder, part="vision_model")
        assert list(tower) == sorted(expected)
        assert all(torch.equal(tower[name].read(), expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("name", "content", "error", "said"),
    [
        ("model.safetensors", b"", TruncatedFile, r"model\.safetensors.*cut short"),
        ("model.safetensors", b"\xff" * 64, TruncatedFile, r"model\.safetensors.*cut short"),
        ("model.safetensors.index.json", b"{", BadFile, r"index\.json"),
        ("model.fp16.safetensors", b"x", BadFile, r"variant model\.fp16\.safetensors, copy it"),
        ("pytorch_model.bin", b"x", BadFile, r"pytorch_model\.bin is a pickle[\s\S]*save_pretrai"),
        (None, b"", BadFile, "found: nothing"),
    ],
)
def test_a_folder_without_readable_safetensors_is_refused(tmp_path, name, content, error, said):
    if name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=said):
        LazyCheckpoint(tmp_path)
    with pytest.raises(MissingPath, match="nowhere"):
        LazyCheckpoint(tmp_path / "nowhere")


def test_a_truncated_file_is_named_when_opened_and_when_read(tmp_path):
    folder = checkpoints.vision_folder(tmp_path / "model")
    checkpoint, file = LazyCheckpoint(folder), folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for read in (lambda: LazyCheckpoint(folder), next(iter(checkpoint.values())).read):
        with pytest.raises(TruncatedFile, match=r"model\.safetensors.*cut short"):
            read()


def test_a_missing_shard_and_a_wrong_index_are_errors(tmp_path):
    folder = written(tmp_path / "model", limit=70)
    file = folder / "model.safetensors.index.json"
    weight_map = json.loads(file.read_text())["weight_map"]
    shard, no_name = weight_map["count"], "no name of a file in this folder"
    for wrong, error, said in (
        ({"count": "../model.safetensors"}, BadFile, no_name),
        ({"count": "a\\b"}, BadFile, no_name),
        ({"count": 3}, BadFile, no_name),
        ({"ghost": shard}, BadFile, "lists ghost in"),
        ({"ghost": "lost.safetensors"}, MissingPath, "lost"),
    ):
        file.write_text(json.dumps({"weight_map": weight_map | wrong}))
        with pytest.raises(error, match=said):
            LazyCheckpoint(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_found_and_the_largest_values_are_not(tmp_path, dtype, wrong):
    extreme = [torch.finfo(dtype).max, torch.finfo(dtype).min, torch.finfo(dtype).tiny / 2, -0.0]
    good = torch.tensor(extreme * 25, dtype=dtype)
    largest = torch.full((8,), torch.finfo(dtype).max, dtype=dtype)  # their sum overflows
    bad = good.clone()
    bad[-1] = wrong
    state = {"good": good, "bad": bad, "none": good[:0], "large": largest, "n": torch.tensor(-1)}
    save_file(state, tmp_path / "model.safetensors")
    checkpoint = LazyCheckpoint(tmp_path)
    assert [name for name, each in checkpoint.items() if not all_finite(each.read())] == ["bad"]
    assert not all_finite(torch.cat([largest, -largest, bad[-1:], -bad[-1:]]))
    assert torch.equal(checkpoint["good"].finite(), good)
    for check in (checkpoint.check_finite, checkpoint["bad"].finite):
        with pytest.raises(NotFinite, match=r"model\.safetensors: bad"):
            check()


def test_the_files_that_transformers_reads_are_read(tmp_path):
    folder = written(tmp_path, limit=70)  # shards with their index
    new = {name: tensor + 1 for name, tensor in TENSORS.items()}
    save_file(new, folder / "model.safetensors")
    (folder / "model-00001-of-00002.safetensors").unlink(missing_ok=True)  # the index is stale
    assert torch.equal(LazyCheckpoint(folder)["a.bias"].read(), new["a.bias"])
    save_file({"other": torch.ones(1)}, folder / "own.safetensors")
    (folder / "config.json").write_text('{"transformers_weights": "own.safetensors"}')
    assert list(LazyCheckpoint(folder)) == ["other"]
    (folder / "config.json").write_text('{"transformers_weights": "../own.safetensors"}')
    with pytest.raises(BadFile, match="no name of a file in this folder"):
        LazyCheckpoint(folder)
