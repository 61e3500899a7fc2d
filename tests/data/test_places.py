"""A path before the hub, every layout in order, nothing left behind, one clear error otherwise."""

import errno
import os
from functools import partial
from unittest.mock import Mock

import checkpoints
import datasets
import pyarrow.parquet
import pytest
from language import jsonl
from test_images import PETS, parquet

from featcal.data.batches import load_batches
from featcal.data.images import load_images
from featcal.data.places import Location, location_of, open_images, open_table, reaching
from featcal.data.texts import load_text
from featcal.errors import BadData, BadFile, BadSetting, DiskFull, HubUnreachable, MissingPath

PLAIN = checkpoints.plain(crop=32)
open_pictures, without_labels = (partial(open_images, labelled=one) for one in (True, False))


def test_an_existing_path_is_read_and_other_names_are_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner/name").mkdir(parents=True)
    assert not location_of("--data", "owner/name").on_hub
    assert location_of("--data", "owner/other") == Location("owner/other", "main", None)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert location_of("--data", "~/owner/name").source == tmp_path / "owner/name"
    assert location_of("--data", "owner/other@v1:digits") == Location("owner/other", "v1", "digits")
    for wrong in ("nowhere", "/no/where", "../no/where", "a/b/c", "../x", "", "x" * 9999):
        with pytest.raises(MissingPath, match="owner/name"):
            location_of("--data", wrong)
    wrong = {"'list' cannot be used": ({"a": ["a text"]}, 42), "seed: nothing is given": ({}, None)}
    for problem, (data, seed) in wrong.items():
        with pytest.raises(BadSetting, match=problem):
            load_batches(data, tmp_path, seed=seed)


def test_shards_of_the_hubs_layout_are_read_in_order(tmp_path):
    (tmp_path / "[data]" / "data").mkdir(parents=True)
    for part, labels in enumerate([(0, 0), (1,)]):
        parquet(tmp_path / f"part{part}", labels=labels, feature=PETS)
        shard = tmp_path / "[data]/data" / f"test-{part:05d}-of-00002.parquet"
        os.rename(tmp_path / f"part{part}" / "test.parquet", shard)
    assert load_images(tmp_path / "[data]", "test", PLAIN).labels.tolist() == [0, 0, 1]
    os.rename(shard, shard.with_name("test-00001-of-00003.parquet"))
    assert Location(tmp_path / "[data]").has_splits
    for shards in (2, 1):  # the second leaves the first's files
        table = datasets.Dataset.from_dict({"text": ["a", "b"]})
        table.save_to_disk(tmp_path / "saved", num_shards=shards)
    for path, split in ((tmp_path / "[data]", "test"), (tmp_path / "saved", "train")):
        with pytest.raises(BadData, match="its shards are not those of one table: .*-00000-of-"):
            open_table(Location(path), split)


@pytest.mark.parametrize("layout", ["train/x", "train", "", "Valley"])
def test_pictures_without_labels_are_read_in_order_of_their_paths(tmp_path, layout, monkeypatch):
    names = ["b.png", "a.png", "B.PNG", "10.jpg", "9.jpg"]
    (tmp_path / layout / ".hidden").mkdir(parents=True)
    for name in [*names, ".hidden/c.png"]:
        checkpoints.picture().save(tmp_path / layout / name)
    (tmp_path / layout / "loop").symlink_to(tmp_path / layout)
    rows = open_images(Location(tmp_path), "train", False)["image"]
    assert [os.path.basename(row["path"]) for row in rows] == sorted(names)
    monkeypatch.setattr(os, "walk", Mock(wraps=os.walk))
    assert Location(tmp_path).has_splits == layout.startswith("train")
    assert os.walk.call_count < 2
    lines = jsonl(tmp_path / "lines.jsonl", [{"picture": f"{layout}/{name}"} for name in names])
    rows = open_images(Location(lines), "train", False, {"image": "picture"})["image"]
    assert [os.path.basename(row["path"]) for row in rows] == names
    checkpoints.picture().save(tmp_path / layout / os.fsdecode(b"caf\xe9.png"))
    with pytest.raises(BadData, match=r"caf\\udce9\.png' is not text in UTF-8"):
        open_images(Location(tmp_path), "train", False)


def test_nothing_is_left_in_the_data_folder_or_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home")
    parquet(tmp_path / "set", feature=PETS)
    load_images(tmp_path / "set", "test", PLAIN)
    assert os.listdir(tmp_path) == ["set"] and os.listdir(tmp_path / "set") == ["test.parquet"]


@pytest.mark.parametrize("read", [open_table, open_pictures, without_labels, load_text])
def test_a_missing_split_is_reported_with_the_folders_content(tmp_path, read):
    parquet(tmp_path / "set", feature=PETS)
    (tmp_path / "set" / f"{'x' * 240}.bin").touch()
    folders = {"nowhere": "nothing", "own": "Val17", "one": "mnist", "two": "svhn", "set": "test"}
    names = ("own/Val17", "one/mnist/train", "two/svhn/test", "two/svhn/train", "two/svhn/x")
    checkpoints.pictures(tmp_path, 0, dict.fromkeys(names, 1))
    for name, content in folders.items():
        with pytest.raises(MissingPath, match=rf"train[\s\S]*the folder has: {content}") as error:
            read(Location(tmp_path / name), "train")
    assert "xx … xx" in str(error.value)


@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_a_message_of_the_hub_is_short_however_long_its_reason(kind):
    name, more = f"{'owner' * 5}/{'name' * 8}", "; no file or folder of this name is here either"
    with pytest.raises(HubUnreachable) as error, reaching(name, "main", more, kind):
        raise OSError("reason" * 200)
    assert len(str(error.value)) <= 500


def test_files_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    file = parquet(tmp_path, feature=PETS) / "test.parquet"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(BadData, match=r"test\.parquet: cannot be read"):
        open_pictures(Location(tmp_path), "test")
    pyarrow.parquet.write_table(pyarrow.table({"text": []}), tmp_path / "none.parquet")
    with pytest.raises(BadData, match="it holds no sample"):
        open_table(Location(tmp_path / "none.parquet"), "train")
    with monkeypatch.context() as patch, pytest.raises(DiskFull, match="no space left"):
        failed = datasets.exceptions.DatasetGenerationError()
        failed.__cause__ = OSError(errno.ENOSPC, "full")
        patch.setattr(datasets, "load_dataset", Mock(side_effect=failed))
        open_table(Location(tmp_path / "none.parquet"), "train")
    (tmp_path / "a.xlsx").write_text("text\n")
    with pytest.raises(BadFile, match=r"a\.xlsx: is no data file"):
        open_table(Location(tmp_path / "a.xlsx"), "train")
    (tmp_path / "gone-00000-of-00001.parquet").symlink_to("nowhere")  # as of an emptied cache
    with pytest.raises(BadData, match=r"gone-.*\.parquet: cannot be read"):
        open_table(Location(tmp_path), "gone")
    for pointer in ("a.txt", "a.jsonl", "a.json", "a.csv", "a.parquet", "train/x/a.png"):
        (tmp_path / pointer).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / pointer).write_text("version https://git-lfs.github.com/spec/v1\nsize 9\n")
        with pytest.raises(BadFile, match=rf"{pointer}: holds a pointer[\s\S]*git lfs pull"):
            if pointer.endswith("png"):
                load_images(tmp_path, "train", PLAIN)
            load_text(Location(tmp_path / pointer), "train")
    with pytest.raises(BadData, match=r"pictures[\s\S]*reads texts[\s\S]*train\.parquet"):
        load_text(Location(tmp_path), "train")


@pytest.mark.parametrize("split", ["../train", "/train", "a/b", "..", "", "*"])
@pytest.mark.parametrize("read", [open_table, open_pictures])
def test_a_split_that_is_a_path_is_refused(tmp_path, split, read):
    jsonl(tmp_path / "train.jsonl", [{"text": "one"}])
    with pytest.raises(BadSetting, match="split"):
        read(Location(tmp_path), split)
