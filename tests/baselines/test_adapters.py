"""Adapters as files, and their accuracy next to the model's."""

import json
from inspect import signature
from types import SimpleNamespace

import checkpoints
import pytest
import torch
from pydantic import PositiveFloat
from test_corrections import pair, pairs
from test_zero_shot import pictures, right_by_hand
from tiny import experiment
from torch import nn

import featcal
from featcal import errors
from featcal.baselines.adapters import BASELINES, Adapters, baseline
from featcal.baselines.corrections import MeanShift, ProbSurgery, Surgery
from featcal.baselines.training import public
from featcal.evaluation.accuracy import evaluate_pool

SURGERY, PROB_SURGERY = Surgery(rank=3, steps=20), ProbSurgery(hidden=4, steps=20)


@pytest.fixture(scope="module")
def adapters():
    return SURGERY.fit(pairs(dtype=torch.float32))


@pytest.mark.parametrize("settings", [SURGERY, PROB_SURGERY], ids=lambda s: s.name)
def test_loaded_adapters_equal_saved_ones(settings, tmp_path):
    adapters, again = (settings.fit(pairs(dtype=torch.float32)) for _ in range(2))
    folder, other = adapters.save(tmp_path / "adapters"), again.save(tmp_path / "again")
    assert all(path.read_bytes() == (other / path.name).read_bytes() for path in folder.iterdir())
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    with pytest.raises(errors.BadFile, match=r"no adapters\.json; it is not replaced"):
        adapters.save(checkpoints.vision_folder(tmp_path / "model"))
    adapters.save(folder)
    loaded = Adapters.load(folder)
    assert (loaded.settings, loaded.seed, loaded.width) == (settings, 42, 12)
    assert loaded.tasks == ["mnist", "dtd", "svhn"]
    features = pair(9, 5, dtype=torch.float32).merged
    for task, curve in adapters.losses.items():
        assert torch.equal(loaded.apply(task, features), adapters.apply(task, features))
        assert loaded.losses[task] == pytest.approx(curve, rel=1e-5) and len(curve) == 20


def test_a_class_under_the_decorator_is_a_whole_baseline(tmp_path, monkeypatch):
    monkeypatch.setattr("featcal.baselines.adapters.BASELINES", dict(BASELINES))

    @baseline("scaled_shift", "Scaled shift")
    class ScaledShift(MeanShift):
        """Add a multiple of the mean difference."""

        factor: PositiveFloat = 1.0

        def correction(self, weights, features):
            return self.factor * super().correction(weights, features)

    scaled_shift, given = public(ScaledShift), experiment()
    assert signature(scaled_shift).parameters["factor"].default == 1.0
    models = given["merged"], given["experts"], given["batches"]
    with pytest.raises(errors.UnknownKey, match="scaled_shift: .*facter.*factor"):
        scaled_shift(*models, facter=2.0)
    adapters = scaled_shift(*models, factor=2.0)
    again = Adapters.load(adapters.save(tmp_path / "a"))
    plain, rows = featcal.mean_shift(*models), torch.zeros(3, adapters.width)
    for task in plain.tasks:
        assert torch.equal(again.apply(task, rows), 2.0 * plain.apply(task, rows))


@pytest.mark.parametrize(
    ("error", "message", "tensor"),
    [
        (errors.BadFile, r"dtd/up is \(12, 2\), but \(12, 3\)", torch.zeros(12, 2)),
        (errors.NotFinite, "dtd/up holds NaN", torch.full((12, 3), float("inf"))),
        (errors.MissingTensor, "no tensor named 'dtd/up'", None),
    ],
)
def test_wrong_tensors_are_named(error, message, tensor, adapters, tmp_path):
    folder, file = adapters.save(tmp_path / "a"), "adapters.safetensors"
    checkpoints.with_tensors(folder, {"dtd/up": tensor}, file)
    with pytest.raises(error, match=f"{file}: {message}"):
        Adapters.load(folder)


def test_damaged_or_missing_files_are_named(adapters, tmp_path):
    path = adapters.save(tmp_path / "a") / "adapters.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(errors.TruncatedFile, match="adapters.safetensors"):
        Adapters.load(path.parent)
    path.unlink()
    with pytest.raises(errors.MissingPath, match="adapters.safetensors"):
        Adapters.load(path.parent)
    with pytest.raises(errors.MissingPath, match="a folder of adapters"):
        Adapters.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("error", "message", "changed"),
    [
        (errors.BadFile, "method is 'sugery'", {"method": "sugery"}),
        (errors.UnknownKey, "did you mean 'rank'", {"settings": {"rnak": 3}}),
        (errors.BadFile, "width is missing or not a int", {"width": None}),
        (errors.MissingTensor, "stl10/down", {"tasks": ["mnist", "stl10"]}),
    ],
)
def test_wrong_records_are_named(error, message, changed, adapters, tmp_path):
    path = adapters.save(tmp_path / "a") / "adapters.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(error, match=message):
        Adapters.load(path.parent)


def test_an_unknown_task_another_width_and_models_without_a_fit_head_are_named(adapters):
    language = SimpleNamespace(get_output_embeddings=lambda: nn.Linear(1, 1))
    for error, message, model in (
        (errors.BadPlan, "has no language head", checkpoints.vision()),
        (errors.BadSetting, "must be raw for a language model", language),
    ):
        with pytest.raises(error, match=message), adapters.before_head(model, "mnist"):
            pass
    with pytest.raises(errors.UnknownKey, match="'mnst' is not known here; did you mean 'mnist'"):
        adapters.apply("mnst", torch.zeros(1, 12))
    with pytest.raises(errors.BadData, match="of mnist: their width is 11, but 12 is expected"):
        adapters.apply("mnist", torch.zeros(1, 11))


@pytest.mark.parametrize("features", ["unit", "raw"])
def test_adapted_features_are_scored_in_the_pass_of_their_model(features):
    clip, sets = checkpoints.clip(), {"pets": pictures(23), "ships": pictures(11, seed=1)}
    projection, merged, passes = clip.visual_projection.weight, clip.vision_model, []
    merged.register_forward_hook(lambda *_: passes.append(1))
    heads = {task: torch.randn(3, 8, generator=torch.Generator().manual_seed(7)) for task in sets}
    pool = {task: pair(i, 9, width=8, dtype=torch.float32) for i, task in enumerate(sets)}
    adapters = Surgery(rank=4, steps=50, lr=0.05, features=features).fit(pool)
    models = {"merged": merged, "expert": {"pets": checkpoints.vision(1)}}
    adapted = {name: (name[8:], adapters.apply) for name in ("surgery merged", "surgery expert")}
    correct = evaluate_pool(models, sets, heads, projection, batch=5, adapted=adapted)
    assert len(passes) == 5 + 3 and list(correct["surgery expert"]) == ["pets"]
    for task, images in sets.items():
        right = right_by_hand(clip.vision_model, clip, heads[task], images)
        assert correct["merged"][task].tolist() == right
        with torch.no_grad():
            f = clip.vision_model(pixel_values=images.pixels).pooler_output @ projection.T
        answers = (adapters.apply(task, f) @ heads[task].T).argmax(-1)
        right = (answers == torch.as_tensor(images.labels)).tolist()
        assert correct["surgery merged"][task].tolist() == right
    assert any(not torch.equal(correct["surgery merged"][t], correct["merged"][t]) for t in sets)
