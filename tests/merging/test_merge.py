"""Averaging and task arithmetic: by hand, in memory, streamed, and refused."""

import weakref

import checkpoints
import pytest
import torch
from safetensors.torch import load_file

from featcal.errors import MissingTensor, TensorsDiffer
from featcal.merging.merge import merge
from featcal.models.checkpoint import LazyCheckpoint


@pytest.fixture
def folders(tmp_path):
    base = checkpoints.clip_folder(tmp_path / "base")
    experts = {
        "mnist": checkpoints.vision_folder(tmp_path / "mnist", seed=1),
        "dtd": checkpoints.legacy_folder(tmp_path / "dtd", seed=2),
    }
    return base, experts


def test_the_default_scale_is_the_papers():
    base, experts = checkpoints.vision(), {str(i): checkpoints.vision(i) for i in (1, 2, 3)}
    merged = merge("task_arithmetic", base, experts)
    mean = merge("average", base, experts)
    for ours, average, own in zip(
        merged.parameters(), mean.parameters(), base.parameters(), strict=True
    ):
        assert torch.allclose(ours, own + 0.3 * 3 * (average - own), rtol=0, atol=1e-6)
    assert not merged.training


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


def test_a_missing_tensor_names_both_files_and_near_names(folders, tmp_path):
    checkpoints.with_tensors(folders[1]["mnist"], {"encoder.layers.0.mlp.fc1.weight": None})
    said = r"mnist/model\.safetensors .*base.*fc1\.weight.*nearest"
    with pytest.raises(MissingTensor, match=said):
        merge("average", *folders, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_counters_are_copied_when_equal_and_refused_when_not(tmp_path):
    folders = {seed: checkpoints.vision_folder(tmp_path / str(seed), seed) for seed in (0, 1, 2)}
    for folder in folders.values():
        checkpoints.with_tensors(folder, {"steps": torch.tensor(7)})
    merge("average", folders[0], [folders[1], folders[2]], out=tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")["steps"] == 7
    checkpoints.with_tensors(folders[2], {"steps": torch.tensor(8)})
    with pytest.raises(TensorsDiffer, match="steps"):
        merge("average", folders[0], [folders[1], folders[2]], out=tmp_path / "other")
