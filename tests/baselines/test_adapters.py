"""Adapters as files, and scored beside the model they sit behind."""

import json
from itertools import islice

import checkpoints
import pytest
import torch
from adapter_features import pair, pairs
from safetensors.torch import load_file, save_file
from test_evaluation import pictures, right_by_hand
from torch import nn

from featcal.baselines.adapters import Adapters
from featcal.baselines.features import kept_steps
from featcal.baselines.settings import ProbSurgery, Surgery
from featcal.baselines.training import train
from featcal.errors import (
    BadData,
    BadFile,
    BadPlan,
    BadSetting,
    MissingPath,
    MissingTensor,
    NotFinite,
    TruncatedFile,
    UnknownKey,
)
from featcal.evaluation.zero_shot import evaluate_pool

METHODS = [Surgery(rank=3, steps=20), ProbSurgery(hidden=4, steps=20)]


def trained(settings=METHODS[0], features=None):
    features = features or pairs(dtype=torch.float32)
    return train(settings, islice(kept_steps(features, settings, 42), settings.steps), 42)


def with_tensors(folder, changed):
    """Replaces tensors of a folder of adapters; None removes one."""
    tensors = load_file(folder / "adapters.safetensors") | changed
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / "adapters.safetensors")


def with_record(folder, **changed):
    path = folder / "adapters.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


@pytest.mark.parametrize("settings", METHODS, ids=lambda s: s.name)
def test_what_was_saved_is_what_is_loaded(settings, tmp_path):
    adapters = trained(settings)
    loaded = Adapters.load(adapters.save(tmp_path / "adapters"))
    assert (loaded.settings, loaded.seed, loaded.tasks, loaded.width) == (
        settings,
        42,
        ["mnist", "dtd", "svhn"],
        12,
    )
    features = pair(9, 5, dtype=torch.float32).merged
    for task, curve in adapters.losses.items():
        assert torch.equal(loaded.apply(task, features), adapters.apply(task, features))
        assert loaded.losses[task] == pytest.approx(curve, rel=1e-5) and len(curve) == 20


def test_the_same_adapters_are_the_same_bytes(tmp_path):
    one, two = (trained().save(tmp_path / name) for name in "ab")
    assert sorted(p.name for p in one.iterdir()) == [
        "README.md",
        "adapters.json",
        "adapters.safetensors",
    ]
    assert all((one / p.name).read_bytes() == p.read_bytes() for p in two.iterdir())


def test_damaged_weights_are_named(tmp_path):
    folder = trained().save(tmp_path / "a")
    cases = {
        r"adapters.safetensors: dtd/up is \(12, 2\), but \(12, 3\)": (
            BadFile,
            {"dtd/up": torch.zeros(12, 2)},
        ),
        "adapters.safetensors: dtd/up holds NaN": (
            NotFinite,
            {"dtd/up": torch.full((12, 3), float("inf"))},
        ),
        "no tensor named 'dtd/up'": (MissingTensor, {"dtd/up": None}),
    }
    for text, (error, changed) in cases.items():
        with_tensors(folder, changed)
        with pytest.raises(error, match=text):
            Adapters.load(folder)
    whole = (folder / "adapters.safetensors").read_bytes()
    (folder / "adapters.safetensors").write_bytes(whole[:-9])
    with pytest.raises(TruncatedFile, match="adapters.safetensors"):
        Adapters.load(folder)
    (folder / "adapters.safetensors").unlink()
    with pytest.raises(MissingPath, match="adapters.safetensors"):
        Adapters.load(folder)


def test_damaged_records_are_named(tmp_path):
    folder = trained().save(tmp_path / "a")
    cases = {
        "method": "sugery",
        "settings": {"rnak": 3},
        "width": None,
        "tasks": ["mnist", "stl10"],
    }
    wanted = {
        "method": (BadFile, "method is 'sugery'"),
        "settings": (UnknownKey, "did you mean 'rank'"),
        "width": (BadFile, "width is missing or not a int"),
        "tasks": (MissingTensor, "stl10/down"),
    }
    for key, value in cases.items():
        whole = (folder / "adapters.json").read_text()
        with_record(folder, **{key: value})
        with pytest.raises(wanted[key][0], match=wanted[key][1]):
            Adapters.load(folder)
        (folder / "adapters.json").write_text(whole)
    with pytest.raises(MissingPath, match="a folder of adapters"):
        Adapters.load(tmp_path / "nowhere")


def test_a_task_without_adapter_and_features_of_another_width_are_named():
    adapters = trained()
    with pytest.raises(UnknownKey, match="'mnst' is not known here; did you mean 'mnist'"):
        adapters.apply("mnst", torch.zeros(1, 12))
    with pytest.raises(BadData, match="features of mnist: their width is 11, but 12 is expected"):
        adapters.apply("mnist", torch.zeros(1, 11))


def test_models_without_a_language_head_and_unit_features_cannot_be_hooked():
    with (
        pytest.raises(BadPlan, match="has no language head"),
        trained(METHODS[1]).before_head(checkpoints.vision(), "mnist"),
    ):
        pass

    class Language(nn.Module):
        def get_output_embeddings(self):
            return nn.Linear(1, 1)

    with (
        pytest.raises(BadSetting, match="must be raw for a language model"),
        trained().before_head(Language(), "mnist"),
    ):
        pass


class Counting(nn.Module):
    """A vision model that counts its passes."""

    def __init__(self, vision):
        super().__init__()
        self.vision, self.passes = vision, 0

    def forward(self, **batch):
        self.passes += 1
        return self.vision(**batch)


@pytest.mark.parametrize("features", ["unit", "raw"])
def test_adapted_features_are_scored_in_the_pass_of_the_model_they_come_from(features):
    clip, sets = checkpoints.clip(), {"pets": pictures(23), "ships": pictures(11, seed=1)}
    projection, merged = clip.visual_projection.weight, Counting(clip.vision_model)
    heads = {task: torch.randn(3, 8, generator=torch.Generator().manual_seed(7)) for task in sets}
    both = {task: pair(i, 9, width=8, dtype=torch.float32) for i, task in enumerate(sets)}
    adapters = trained(Surgery(rank=4, steps=50, lr=0.05, features=features), both)
    judged = evaluate_pool(
        {"merged": merged, "expert": {"pets": checkpoints.vision(1)}},
        sets,
        heads,
        projection,
        batch=5,
        adapted={
            "surgery": ("merged", adapters.apply),
            "of the expert": ("expert", adapters.apply),
        },
    )
    assert merged.passes == 5 + 3
    assert list(judged["of the expert"]) == ["pets"]
    for task, images in sets.items():
        assert judged["merged"][task].tolist() == right_by_hand(
            clip.vision_model, clip, heads[task], images
        )
        with torch.no_grad():
            f = clip.vision_model(pixel_values=images.pixels).pooler_output @ projection.T
        want = (adapters.apply(task, f) @ heads[task].T).argmax(-1) == torch.as_tensor(
            images.labels
        )
        assert judged["surgery"][task].tolist() == want.tolist()
    assert any(judged["surgery"][task].tolist() != judged["merged"][task].tolist() for task in sets)
