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
from reproduction.mini.images import COUNTS, draw_split, shifted, write_parquet
from reproduction.mini.pretrain import (
    MODELS,
    SIZES,
    Recipe,
    Size,
    image_processor,
    new_model,
    normalised,
    pretrain,
)
from reproduction.mini.tasks import TASKS
from reproduction.mini.training import restore_state, save_state
from reproduction.prepare.fine_tune import batch_indices, fine_tune
from reproduction.prepare.suite import FineTune

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
