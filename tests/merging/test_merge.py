"""Averaging, task arithmetic and TIES: by hand, on flattened vectors, streamed, and refused."""

import shutil
import weakref

import checkpoints
import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import ResNetConfig, ResNetModel

import featcal
from featcal.errors import BadFile, BadSetting, FeatCalError, MissingTensor, TensorsDiffer
from featcal.merging import tensors
from featcal.merging.merge import merge
from featcal.merging.methods.entries import ties_tensor as merged_vector
from featcal.merging.tensors import kth_smallest
from featcal.models.checkpoint import LazyCheckpoint

RESNET = {"embedding_size": 8, "hidden_sizes": [8], "depths": [1], "layer_type": "basic"}


@pytest.fixture
def folders(tmp_path):
    base = checkpoints.clip_folder(tmp_path / "base")
    mnist = checkpoints.vision_folder(tmp_path / "mnist", seed=1)
    return base, {"mnist": mnist, "dtd": checkpoints.legacy_folder(tmp_path / "dtd", seed=2)}


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
    checkpoints.renamed(folders[1]["mnist"], "_orig_mod.{}".format)  # of torch.compile
    with pytest.raises(BadFile, match=r"mnist/model\.safetensors: _orig_mod.*in a wrapper"):
        merge("average", *folders, out=tmp_path / "out")
    shutil.copytree(folders[1]["dtd"], folders[1]["mnist"], dirs_exist_ok=True)
    config = folders[0] / "config.json"
    config.write_text(config.read_text().replace('hidden_layers": 2', 'hidden_layers": 3'))
    with pytest.raises(MissingTensor, match=r"base: .*layers\.2\..* nearest names"):
        merge("average", *folders, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_whole_clips_and_vision_towers_are_merged_as_towers(folders, tmp_path):
    (base, experts), whole = folders, checkpoints.clip_folder(tmp_path / "whole", seed=1)
    want = merge("average", base, experts)
    for one, two in ((whole, experts["dtd"]), (checkpoints.clip(1), checkpoints.vision(2))):
        assert all(tiny.same_bits(merge("average", m, [one, two]), want) for m in (base, two))


@pytest.mark.parametrize("name", ["base", "mnist", "", "base/new"])
def test_no_folder_that_is_read_is_replaced(folders, tmp_path, name):
    (base, experts), out = folders, tmp_path / name
    batches = {task: [{"pixel_values": torch.zeros(2, 3, 32, 32)}] for task in experts}
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BadSetting, match="is read; name another one"):
        merge("average", base, experts, out=out)
    with pytest.raises(BadSetting, match="is read; name another one"):
        featcal.calibrate(base, base=base, experts=experts, batches=batches, out=out)
    assert sorted(tmp_path.rglob("*")) == before


def test_counters_are_copied_when_equal_and_refused_when_not(tmp_path):
    folders = {seed: checkpoints.vision_folder(tmp_path / str(seed), seed) for seed in (0, 1, 2)}
    for seed, folder in folders.items():
        counters = {"steps": torch.tensor(7), "norm.num_batches_tracked": torch.tensor(seed)}
        checkpoints.with_tensors(folder, counters)
    merge("average", folders[0], [folders[1], folders[2]], out=tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written["steps"] == 7 and written["norm.num_batches_tracked"] == 0  # the base's
    checkpoints.with_tensors(folders[2], {"steps": torch.tensor(8)})
    with pytest.raises(TensorsDiffer, match="steps"):
        merge("average", folders[0], [folders[1], folders[2]], out=tmp_path / "other")


@pytest.mark.parametrize(("method", "settings"), [("dare", {}), ("ties", {"scale": 1e300})])
def test_values_that_no_model_can_use_are_not_written(tmp_path, method, settings):
    base = tiny.make(lambda: ResNetModel(ResNetConfig(**RESNET)), dtype=torch.float32)
    experts = {str(i): tiny.shifted(base, i, 0.01) for i in range(4)}
    for name, variance in (pair for expert in experts.values() for pair in expert.named_buffers()):
        variance *= 0.1 if name.endswith("running_var") else 1
    with pytest.raises(FeatCalError, match=f"{method} gives NaN, infinite values or negative var"):
        merge(method, base, experts, out=tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def flat(module):
    return np.concatenate([t.double().numpy().ravel() for t in module.state_dict().values()])


def by_flattening(base, experts, density, scale, combine):
    """The same method on whole flat vectors, with a sort for the cut."""
    start = flat(base)
    vectors = np.stack([flat(expert) - start for expert in experts])
    d = vectors.shape[1]
    for vector in vectors:
        kept = d - int(d * density)
        cut = np.sort(np.abs(vector))[kept - 1] if kept else 0.0
        vector[np.abs(vector) < cut] = 0
    sign = np.sign(vectors.sum(0))
    sign[sign == 0] = np.sign(sign.sum())
    agreeing = vectors * np.where(sign > 0, vectors > 0, vectors < 0)
    total = agreeing.sum(0)
    total = total / np.maximum((agreeing != 0).sum(0), 1) if combine == "mean" else total
    return start + scale * total


@pytest.mark.parametrize("majority", [1.0, -1.0])
def test_where_experts_cancel_exactly_the_sign_of_the_majority_decides(majority):
    experts = [torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 1.0])]
    assert merged_vector(experts, [0.0, 0.0], "sum", lambda: majority).tolist() == [majority, 3.0]


@pytest.mark.parametrize("combine", ["sum", "mean"])
@pytest.mark.parametrize("density", [0.2, 0.7, 1.0])
def test_a_model_equals_the_method_on_flattened_vectors(density, combine):
    base, *experts = (checkpoints.vision(seed).double() for seed in range(4))
    merged = merge("ties", base.train(), experts, density=density, scale=0.4, combine=combine)
    expected = by_flattening(base, experts, density, 0.4, combine)
    np.testing.assert_allclose(flat(merged), expected, rtol=0, atol=1e-12)
    assert not merged.training


def test_the_order_of_the_tasks_and_the_size_of_the_pieces_do_not_matter(monkeypatch):
    experts = {str(i): checkpoints.vision(i) for i in range(1, 4)}
    one = merge("ties", checkpoints.vision(), experts).state_dict()
    monkeypatch.setattr(tensors, "PIECE", 1000)
    other = merge("ties", checkpoints.vision(), dict(reversed(experts.items()))).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("values", ["spread", "equal", "tiny", "negative zeros"])
def test_the_kth_smallest_is_what_sorting_gives(values):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(3), dtype=torch.float64).abs()
    x = {
        "spread": x,
        "equal": (4 * x).round() / 4,
        "tiny": x * 1e-310,
        "negative zeros": torch.where(x > 1.5, x, -0.0),
    }[values]
    ranks = (0, 1, 2, 500, 999, 1000)
    wanted = [(stream, k) for stream in (0, 1) for k in ranks]  # the second stream has 2 x
    result = kth_smallest(lambda: ((part, 2 * part) for part in x.split(300)), wanted)
    assert result == [(stream + 1) * [0.0, *x.sort().values.tolist()][k] for stream, k in wanted]
