"""Images, labels, prompts and draws: the same pixels as transformers, and one clear error for bad
input.
"""

import os
from io import BytesIO

import checkpoints
import datasets
import numpy as np
import pytest
import torch
from checkpoints import picture

from featcal.data.images import Preprocess
from featcal.data.load import class_names, load_images
from featcal.data.splits import quiet
from featcal.errors import BadData, BadFile, HubUnreachable, MissingPath, TruncatedFile
from reproduction.data.registry import TASKS

README = """---
dataset_info:
  features:
  - name: image
    dtype: image
  - name: label
    dtype:
      class_label:
        names:
          '1': "dog"
          '0': "cat"
---
# pets
"""


@pytest.fixture(scope="module")
def preprocess(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processor")
    checkpoints.processor().save_pretrained(folder)
    return Preprocess.from_folder(folder)


def encoded(image, kind="PNG"):
    out = BytesIO()
    image.save(out, kind)
    return {"bytes": out.getvalue(), "path": None}


def parquet(folder, split="test", labels=(0, 1, 1), feature=None, without=(), **changed):
    """Writes <split>.parquet; `feature` is the type of the labels, `changed` are other or further
    columns.
    """
    folder.mkdir(exist_ok=True)
    content = {
        "image": [encoded(picture(seed=i)) for i in range(len(labels))],
        "label": list(labels),
    } | changed
    features = datasets.Features({"image": datasets.Image(), "label": feature}) if feature else None
    table = datasets.Dataset.from_dict(
        {k: v for k, v in content.items() if k not in without}, features=features
    )
    with quiet():
        table.to_parquet(folder / f"{split}.parquet")
    return folder


PETS = datasets.ClassLabel(names=["cat", "dog"])


def test_parquet_gives_pixels_labels_and_names(tmp_path, preprocess):
    images = load_images(parquet(tmp_path, feature=PETS), "test", preprocess)
    assert images.classes == ("cat", "dog") == class_names(tmp_path) and images.labels.tolist() == [
        0,
        1,
        1,
    ]
    assert (
        images.labels.dtype == np.int64
        and images.pixels.shape == (3, 3, 32, 32)
        and len(images) == 3
    )
    assert np.array_equal(images.pixels[1], preprocess.pixels(picture(seed=1)))


def test_batches_hold_the_asked_pictures_in_the_asked_order(tmp_path, preprocess):
    images = load_images(parquet(tmp_path, feature=PETS), "test", preprocess)
    batches = [batch["pixel_values"] for batch in images.batches([2, 0, 2], 2)]
    assert [len(batch) for batch in batches] == [2, 1] and torch.equal(
        torch.cat(batches), images.tensor([2, 0, 2])
    )
    assert torch.equal(
        torch.cat([b["pixel_values"] for b in images.batches(None, 2)]), images.tensor(range(3))
    )


def test_a_split_too_large_for_memory_gives_the_same_tensors(tmp_path, preprocess):
    parquet(tmp_path, feature=PETS)
    held = load_images(tmp_path, "test", preprocess)
    on_demand = load_images(tmp_path, "test", preprocess, in_memory=0)
    assert isinstance(held.pixels, np.ndarray) and not isinstance(on_demand.pixels, np.ndarray)
    assert torch.equal(held.tensor([2, 0]), on_demand.tensor([2, 0])) and len(on_demand.pixels) == 3


def test_names_come_from_the_readme_when_the_labels_have_none(tmp_path, preprocess):
    parquet(tmp_path)
    with pytest.raises(BadData, match="classes have no names"):
        load_images(tmp_path, "test", preprocess)
    with pytest.raises(BadData, match="classes have no names"):
        class_names(tmp_path)
    (tmp_path / "README.md").write_text(README)
    assert (
        load_images(tmp_path, "test", preprocess).classes == ("cat", "dog") == class_names(tmp_path)
    )
    (tmp_path / "README.md").write_text("---\n: [\n---\n")
    with pytest.raises(BadFile, match=r"README\.md"):
        class_names(tmp_path)


def test_given_names_win_and_must_be_as_many_as_the_labels(tmp_path, preprocess):
    parquet(tmp_path, feature=PETS)
    assert load_images(tmp_path, "test", preprocess, classes=["Katze", "Hund"]).classes == (
        "Katze",
        "Hund",
    )
    with pytest.raises(BadData, match="3 class names are given, but its labels have 2"):
        load_images(tmp_path, "test", preprocess, classes=["a", "b", "c"])


def test_true_and_false_labels_become_one_and_zero(tmp_path, preprocess):
    images = load_images(
        parquet(tmp_path, labels=(True, False)), "test", preprocess, classes=["no", "yes"]
    )
    assert images.labels.tolist() == [1, 0]


def test_other_column_names_are_renamed(tmp_path, preprocess):
    pictures = [encoded(picture())] * 3
    parquet(
        tmp_path, without=("image", "label"), jpg=pictures, cls=[0, 1, 0], __key__=["a", "b", "c"]
    )
    images = load_images(
        tmp_path, "test", preprocess, classes=["a", "b"], columns=TASKS["fer2013"].columns
    )
    assert images.labels.tolist() == [0, 1, 0]


def test_shards_of_the_hubs_layout_are_read_in_order(tmp_path, preprocess):
    for part, labels in enumerate([(0, 0), (1,)]):
        parquet(tmp_path / f"part{part}", labels=labels, feature=PETS)
        (tmp_path / "data").mkdir(exist_ok=True)
        os.rename(
            tmp_path / f"part{part}" / "test.parquet",
            tmp_path / "data" / f"test-{part:05d}-of-00002.parquet",
        )
    assert load_images(tmp_path, "test", preprocess).labels.tolist() == [0, 0, 1]


def test_folders_of_pictures_are_read_with_one_numbering_for_all_splits(tmp_path, preprocess):
    for i, place in enumerate(["train/ant/a.png", "train/bee/b.png", "test/bee/c.png"]):
        (tmp_path / place).parent.mkdir(parents=True)
        picture(seed=i).save(tmp_path / place)
    images = load_images(tmp_path, "test", preprocess)
    assert images.classes == ("ant", "bee") == class_names(tmp_path) and images.labels.tolist() == [
        1
    ]
    assert np.array_equal(images.pixels[0], preprocess.pixels(picture(seed=2)))


def test_nothing_is_left_beside_the_data_or_in_the_home_folder(tmp_path, preprocess, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home")
    parquet(tmp_path / "set", feature=PETS)
    load_images(tmp_path / "set", "test", preprocess)
    assert os.listdir(tmp_path) == ["set"] and os.listdir(tmp_path / "set") == ["test.parquet"]


def test_missing_folder_and_split_say_what_is_there(tmp_path, preprocess):
    with pytest.raises(MissingPath, match="nowhere"):
        load_images(tmp_path / "nowhere", "test", preprocess)
    parquet(tmp_path / "set", feature=PETS)
    with pytest.raises(MissingPath, match=r"train\.parquet[\s\S]*the folder has: test\.parquet"):
        load_images(tmp_path / "set", "train", preprocess)


@pytest.mark.parametrize("gone", ["image", "label"])
def test_a_missing_column_names_those_that_are_there(tmp_path, preprocess, gone):
    parquet(tmp_path, without=(gone,), other=[1, 2, 3])
    kept = "label" if gone == "image" else "image"
    with pytest.raises(BadData, match=f"no column '{gone}'; it has {kept}, other"):
        load_images(tmp_path, "test", preprocess, classes=["a", "b"])


@pytest.mark.parametrize("labels", [(0, 2, 1), (0, -1, 1)])
def test_a_label_out_of_range_names_its_row(tmp_path, preprocess, labels):
    with pytest.raises(BadData, match=rf"row 1 has label {labels[1]}, outside 0 to 1"):
        load_images(parquet(tmp_path, labels=labels), "test", preprocess, classes=["a", "b"])


@pytest.mark.parametrize("labels", [(0, None, 1), ("a", "b", "c"), (0.5, 1.0, 0.0)])
def test_labels_that_are_no_whole_numbers_are_refused(tmp_path, preprocess, labels):
    with pytest.raises(BadData, match=r"labels[\s\S]*whole numbers"):
        load_images(parquet(tmp_path, labels=labels), "test", preprocess, classes=["a", "b"])


@pytest.mark.parametrize("broken", [b"no picture", encoded(picture())["bytes"][:200], b""])
def test_an_undecodable_picture_names_its_row(tmp_path, preprocess, broken):
    pictures = [encoded(picture()), {"bytes": broken, "path": None}]
    with pytest.raises(BadData, match="picture in row 1 cannot be decoded"):
        load_images(
            parquet(tmp_path, labels=(0, 1), image=pictures), "test", preprocess, classes=["a", "b"]
        )


def test_pictures_of_different_sizes_need_a_crop(tmp_path):
    pictures = [encoded(picture()), encoded(picture(size=(10, 10)))]
    whole = Preprocess(None, None, None, 3, 1 / 255, (0.0,) * 3, (1.0,) * 3)
    with pytest.raises(BadData, match=r"row 1 is \(10, 10\) pixels, row 0 is \(32, 40\)"):
        load_images(
            parquet(tmp_path, labels=(0, 1), image=pictures), "test", whole, classes=["a", "b"]
        )


def test_a_truncated_parquet_file_is_named(tmp_path, preprocess):
    file = parquet(tmp_path, feature=PETS) / "test.parquet"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(TruncatedFile, match=r"test\.parquet"):
        load_images(tmp_path, "test", preprocess)


def test_an_empty_split_is_refused(tmp_path, preprocess):
    with pytest.raises(BadData, match="no data"):
        load_images(parquet(tmp_path, labels=(), feature=PETS), "test", preprocess)


def test_a_hub_data_set_without_network_is_one_error_with_a_way_out(preprocess, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(HubUnreachable, match=r"tanganke/dtd@0{40}[\s\S]*HF_HOME"):
        load_images("tanganke/dtd", "test", preprocess, revision="0" * 40)
