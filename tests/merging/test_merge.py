"""Averaging and task arithmetic: by hand, in memory, streamed, and refused."""

import os
import weakref

import checkpoints
import pytest
import torch
from safetensors.torch import load_file

from featcal.errors import DiskFull, MissingTensor, TensorsDiffer
from featcal.merging.merge import merge
from featcal.merging.tensors import add_task_vector, task_vectors
from featcal.models import load as writer
from featcal.models.checkpoint import LazyCheckpoint

HALF = "encoder.layers.0.mlp.fc1.weight"


@pytest.fixture
def folders(tmp_path):
    base = checkpoints.clip_folder(tmp_path / "base")
    experts = {
        "mnist": checkpoints.vision_folder(tmp_path / "mnist", seed=1),
        "dtd": checkpoints.legacy_folder(tmp_path / "dtd", seed=2),
    }
    return base, experts


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_the_default_scale_is_the_papers_and_modules_stay_as_they_are():
    base, experts = checkpoints.vision(), {str(i): checkpoints.vision(i) for i in (1, 2, 3)}
    merged = merge("task_arithmetic", base, experts)
    mean = merge("average", base, experts)
    for ours, average, own in zip(
        merged.parameters(), mean.parameters(), base.parameters(), strict=True
    ):
        assert torch.allclose(ours, own + 0.3 * 3 * (average - own), rtol=0, atol=1e-6)
    assert not merged.training and equal(base.state_dict(), checkpoints.vision().state_dict())
    for seed, expert in experts.items():
        assert equal(expert.state_dict(), checkpoints.vision(int(seed)).state_dict())


def test_streaming_holds_one_tensor_of_each_model(folders, tmp_path, monkeypatch):
    alive, most = [], []
    read = LazyCheckpoint._read

    def watched(self, file, name):
        tensor = read(self, file, name)
        alive.append(weakref.ref(tensor))
        most.append(sum(ref() is not None for ref in alive))
        return tensor

    monkeypatch.setattr(LazyCheckpoint, "_read", watched)
    merge("task_arithmetic", *folders, out=tmp_path / "out")
    # the base's is read twice
    assert len(most) == 4 * len(checkpoints.vision().state_dict()) and max(most) == 3


def refused(error, match, folders, tmp_path):
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(error, match=match):
        merge("average", *folders, out=tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == before


def test_a_missing_tensor_names_both_files_and_near_names(folders, tmp_path):
    checkpoints.with_tensors(folders[1]["mnist"], {HALF: None})
    said = r"mnist/model\.safetensors .*base.*fc1\.weight.*nearest"
    refused(MissingTensor, said, folders, tmp_path)


def test_counters_are_copied_when_equal_and_refused_when_not(tmp_path):
    folders = {seed: checkpoints.vision_folder(tmp_path / str(seed), seed) for seed in (0, 1, 2)}
    for folder in folders.values():
        checkpoints.with_tensors(folder, {"steps": torch.tensor(7)})
    merge("average", folders[0], [folders[1], folders[2]], out=tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")["steps"] == 7
    checkpoints.with_tensors(folders[2], {"steps": torch.tensor(8)})
    with pytest.raises(TensorsDiffer, match="steps"):
        merge("average", folders[0], [folders[1], folders[2]], out=tmp_path / "other")
