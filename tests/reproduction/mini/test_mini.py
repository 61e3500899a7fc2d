"""The embedded suite: drawn tasks, captions, pre-training, fine-tuning, and the two bases that come
with the package.
"""

import io
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel, CLIPProcessor

from featcal.errors import Diverged
from reproduction.mini import pretrain as pretraining
from reproduction.mini.augment import normalised
from reproduction.mini.base_folder import MODELS, image_processor
from reproduction.mini.images import COUNTS, draw_split, write_parquet
from reproduction.mini.pretrain import Recipe, pretrain
from reproduction.mini.shift import shifted
from reproduction.mini.tasks import TASKS
from reproduction.mini.towers import SIZES, Size, new_model
from reproduction.mini.training_state import restore_state, save_state
from reproduction.suites.descent import batch_indices
from reproduction.suites.fine_tune import fine_tune
from reproduction.suites.recipe import FineTune

TINY = Size(hidden=16, layers=2, heads=2, projection=8)
SHORT = Recipe(TINY, steps=6, batch=16, pictures=8, every=2)


@pytest.mark.parametrize("key", TASKS)
def test_a_task_drawn_twice_is_the_same_and_balanced(key):
    classes = len(TASKS[key].classes)
    images, labels = draw_split(key, "train", 2 * classes, 0, 0.5)
    again, _ = draw_split(key, "train", 2 * classes, 0, 0.5)
    assert images.shape == (2 * classes, 32, 32, 3) and images.dtype == np.uint8
    assert np.array_equal(images, again)
    assert np.bincount(labels).tolist() == [2] * classes


def test_no_picture_occurs_in_two_splits():
    for key in TASKS:
        seen = [
            {image.tobytes() for image in draw_split(key, split, 20, 0, 0.5)[0]} for split in COUNTS
        ]
        assert len(set.union(*seen)) == 60, key


def test_the_shift_belongs_to_the_task_and_not_to_its_place():
    images, _ = draw_split("svhn", "web", 4, 0, 0.0)
    assert np.array_equal(shifted(images, "svhn", 0.0), images)
    assert not np.array_equal(shifted(images, "svhn", 0.5), shifted(images, "mnist", 0.5))
    assert np.array_equal(draw_split("svhn", "web", 4, 0, 0.5)[0], images)


def test_parquet_files_hold_the_drawn_pictures_and_have_the_same_bytes_again(tmp_path):
    for folder in ("a", "b"):
        write_parquet("pcam", tmp_path / folder, 0, 0.5, {"train": 8, "test": 4})
    assert [(tmp_path / "a" / f"{s}.parquet").read_bytes() for s in ("train", "test")] == [
        (tmp_path / "b" / f"{s}.parquet").read_bytes() for s in ("train", "test")
    ]
    rows = pq.read_table(tmp_path / "a" / "test.parquet").to_pylist()
    images, labels = draw_split("pcam", "test", 4, 0, 0.5)
    stored = [np.asarray(Image.open(io.BytesIO(row["image"]["bytes"]))) for row in rows]
    assert (
        np.array_equal(np.stack(stored), images)
        and [row["label"] for row in rows] == labels.tolist()
    )


def test_our_pixels_equal_those_of_the_saved_processor():
    images, _ = draw_split("gtsrb", "web", 3, 0, 0.0)
    theirs = image_processor()([Image.fromarray(image) for image in images], return_tensors="pt")[
        "pixel_values"
    ]
    torch.testing.assert_close(normalised(images), theirs, atol=1e-5, rtol=0)


def test_interrupted_pretraining_ends_in_the_bytes_of_an_undisturbed_one(tmp_path, monkeypatch):
    pretrain("clip_b32", tmp_path / "straight", state_folder=tmp_path / "s1", recipe=SHORT)
    step = pretraining._Run.step

    def interrupted(run):
        if run.done == 5:
            raise KeyboardInterrupt
        return step(run)

    with monkeypatch.context() as patch:
        patch.setattr(pretraining._Run, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pretrain("clip_b32", tmp_path / "resumed", state_folder=tmp_path / "s2", recipe=SHORT)
    assert not (tmp_path / "resumed").exists()
    pretrain("clip_b32", tmp_path / "resumed", state_folder=tmp_path / "s2", recipe=SHORT)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "straight" / name).read_bytes() == (
            tmp_path / "resumed" / name
        ).read_bytes()
    first = new_model(TINY, 0).state_dict()
    last = CLIPModel.from_pretrained(tmp_path / "resumed").state_dict()
    assert all(
        not torch.equal(first[name], last[name]) for name in first if name.endswith("q_proj.weight")
    )


def test_a_state_file_of_another_recipe_is_not_resumed(tmp_path):
    run = pretraining._Run(SHORT)
    run.step()
    run.optimiser.step(1.0)
    save_state(tmp_path / "state.safetensors", run.model, run.optimiser, repr(SHORT), 1)
    done = [
        restore_state(tmp_path / "state.safetensors", run.model, run.optimiser, repr(recipe))
        for recipe in (SHORT, replace(SHORT, steps=7))
    ]
    assert done == [1, 0]


@pytest.fixture(scope="module")
def lesson():
    """A tiny tower, its projection and head, and the pictures of one task."""
    model = new_model(TINY, 0)
    images, labels = draw_split("pcam", "train", 40, 0, 0.5)
    head = F.normalize(torch.randn(2, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
    return (
        model.vision_model,
        model.visual_projection.weight.detach(),
        head,
        2.0,
        normalised(images),
        torch.from_numpy(labels),
    )


def loss(vision, lesson):
    _, projection, head, scale, pixels, labels = lesson
    with torch.no_grad():
        features = F.normalize(vision(pixel_values=pixels).pooler_output @ projection.T, dim=-1)
    return float(F.cross_entropy(np.exp(scale) * features @ head.T, labels))


def test_fine_tuning_lowers_the_loss_and_repeats_itself(lesson):
    settings = FineTune(steps=20, batch=16)
    experts = [fine_tune(*lesson, settings=settings, task="pcam", seed=seed) for seed in (0, 0, 1)]
    first, again, other = (expert.state_dict() for expert in experts)
    assert loss(experts[0], lesson) < loss(lesson[0], lesson) - 0.05
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_fine_tuning_leaves_the_base_and_the_frozen_parts_alone(lesson):
    # the bias of k shifts all scores of a query alike and so has no gradient but rounding
    before = {
        name: value.clone()
        for name, value in lesson[0].state_dict().items()
        if not name.endswith("k_proj.bias")
    }
    after = fine_tune(*lesson, settings=FineTune(steps=3), task="pcam", seed=0).state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert all(torch.equal(before[name], lesson[0].state_dict()[name]) for name in before)
    assert changed == {
        name for name in before if not name.startswith(("embeddings", "pre_layrnorm"))
    }


def test_a_batch_at_a_time_normalised_equals_all_at_once(lesson):
    vision, projection, head, scale, _, labels = lesson
    images, _ = draw_split("pcam", "train", 40, 0, 0.5)
    settings = {"settings": FineTune(steps=3), "task": "pcam", "seed": 0}
    once = fine_tune(*lesson, **settings).state_dict()
    lazily = fine_tune(
        vision, projection, head, scale, images, labels, **settings, normalise=normalised
    ).state_dict()
    assert all(torch.equal(once[name], lazily[name]) for name in once)


def test_a_loss_that_is_not_finite_names_task_and_step(lesson):
    broken = (*lesson[:4], lesson[4] * float("nan"), lesson[5])
    with pytest.raises(Diverged, match="'pcam'.*step 0"):
        fine_tune(*broken, settings=FineTune(steps=3), task="pcam", seed=0)


def test_batches_show_every_picture_once_per_epoch():
    epoch = np.concatenate([batch_indices("pcam", 12, 4, step, 0) for step in range(3)])
    assert sorted(epoch.tolist()) == list(range(12))
    assert not np.array_equal(batch_indices("pcam", 12, 4, 0, 0), batch_indices("dtd", 12, 4, 0, 0))


@pytest.mark.parametrize("role", SIZES)
def test_a_shipped_base_loads_in_float32_and_tells_pictures_apart(role):
    folder = MODELS / role
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert max(files.values()) <= 5 * 2**20 and {"README.md", "tokenizer.json"} <= set(files)
    model, tokenizer = CLIPModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32 and isinstance(
        CLIPProcessor.from_pretrained(folder), CLIPProcessor
    )
    assert list(CLIPImageProcessor.from_pretrained(folder).image_mean) == [0.42] * 3
    images, labels = draw_split("sun397", "validation", 64, 0, 0.0)
    task = TASKS["sun397"]
    texts = tokenizer(
        [task.templates[1].format(name) for name in task.classes], return_tensors="pt", padding=True
    )
    with torch.no_grad():
        guesses = model(pixel_values=normalised(images), **texts).logits_per_image.argmax(1)
    assert (guesses == torch.from_numpy(labels)).float().mean() > 0.5
