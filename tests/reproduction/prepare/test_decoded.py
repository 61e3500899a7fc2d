"""Decoded pictures in a file equal freshly decoded ones; a file of another state is not used."""

import os
import time
from dataclasses import replace
from pathlib import Path

import checkpoints
import numpy as np
import pytest
from checkpoints import picture
from test_images import PETS, encoded, parquet

from featcal.errors import BadData
from reproduction.engine.workers import fan_out
from reproduction.prepare import sources
from reproduction.prepare.sources import DataSource, Split, load_task, mapped_images, write_sources

PLAIN = checkpoints.plain(crop=32)


@pytest.fixture
def pets(tmp_path):
    return Split(parquet(tmp_path / "pets", feature=PETS), "test", PLAIN, whole=True)


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "decoded"


def entries(folder):
    return sorted(path.name for path in folder.glob("*.npy"))


def same(images, expected):
    pixels = [each.pixels[np.arange(len(each))] for each in (images, expected)]
    labels = [(each.labels.tolist(), each.classes) for each in (images, expected)]
    return np.array_equal(*pixels) and labels[0] == labels[1]


def is_kept(kept, split):
    """Return whether the split is found without decoding it."""
    decoded = []
    with pytest.MonkeyPatch.context() as patch:
        load = Split.load
        patch.setattr(Split, "load", lambda self, **kw: decoded.append(self) or load(self, **kw))
        mapped_images(kept, split)
    return not decoded


def test_what_is_found_is_what_was_decoded_to_the_bit(pets, kept):
    decoded, first = pets.load(), mapped_images(kept, pets)
    assert is_kept(kept, pets)
    again = mapped_images(kept, pets)
    assert same(first, decoded) and same(again, decoded) and again.labels.dtype == np.int64
    assert again.preprocess is PLAIN and type(again.pixels) is np.ndarray
    assert not again.pixels.flags.writeable


def test_a_file_of_the_same_size_in_the_same_place_is_noticed(pets, kept):
    mapped_images(kept, pets)
    file = pets.source / "test.parquet"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    time.sleep(0.02)  # a clock of files may tick in hundredths of a second
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=times)
    assert not is_kept(kept, pets) and len(entries(kept)) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"preprocess": checkpoints.plain(crop=16)},
        {"preprocess": checkpoints.plain(crop=32, mean=0.4)},
        {"classes": ("Katze", "Hund")},
        {"name": "train"},
    ],
)
def test_another_question_has_an_answer_of_its_own(pets, kept, change):
    parquet(pets.source, "train", (1, 0), PETS)
    mapped_images(kept, pets)
    for split in (replace(pets, **change), pets):
        assert same(mapped_images(kept, split), split.load())
    assert len(entries(kept)) == 2


def test_other_code_and_another_pil_find_nothing(pets, kept, monkeypatch):
    mapped_images(kept, pets)
    with monkeypatch.context() as patch:
        patch.setattr(sources, "_code", lambda: "edited")
        assert not is_kept(kept, pets)
    mapped_images(kept, pets)
    monkeypatch.setattr("PIL.__version__", "0")
    assert not is_kept(kept, pets)


@pytest.mark.parametrize("kind", [".npy", ".json"])
@pytest.mark.parametrize(
    "spoil", [lambda raw: raw[: len(raw) // 2], lambda raw: b"", lambda raw: b"\xff" * 100]
)
def test_a_spoilt_file_is_made_again(pets, kept, spoil, kind):
    mapped_images(kept, pets)
    (file,) = kept.glob(f"*{kind}")
    content = file.read_bytes()
    file.write_bytes(spoil(content))
    assert same(mapped_images(kept, pets), pets.load()) and file.read_bytes() == content


def test_a_large_split_that_is_not_read_whole_is_decoded_when_asked_for(pets, kept, monkeypatch):
    monkeypatch.setattr(sources, "WORTHWHILE", 1)
    assert same(mapped_images(kept, replace(pets, whole=False)), pets.load()) and not kept.exists()
    assert same(mapped_images(kept, pets), pets.load()) and len(entries(kept)) == 1


def test_pictures_of_two_sizes_are_noticed_across_chunks(kept, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 1)
    sizes = [encoded(picture()), encoded(picture(size=(10, 10)))]
    folder = parquet(tmp_path / "sizes", labels=(0, 1), feature=PETS, image=sizes)
    with pytest.raises(BadData, match=r"row 1 is \(10, 10\) pixels, row 0 is \(32, 40\)"):
        mapped_images(kept, Split(folder, "test", checkpoints.plain(), whole=True))


def total(folder: Path, split: Split) -> int:
    return int(mapped_images(folder, split).pixels[np.arange(3)].sum())


def test_two_processes_at_once_read_the_same(pets, kept):
    totals = dict(fan_out("decode", total, {str(n): (kept, pets) for n in range(6)}, 2))
    assert set(totals.values()) == {int(pets.load().pixels.sum(dtype=np.int64))}
    assert len(entries(kept)) == 1


@pytest.mark.parametrize("processor", ["pil", "torchvision"])
def test_the_processor_of_a_suite_reaches_its_pictures(tmp_path, processor):
    pytest.importorskip("torchvision")
    checkpoints.processor().save_pretrained(tmp_path)
    fields = {"location": "pets", "kind": "folder", "paper_name": "Pets", "description": ""}
    content = {"classes": ("a", "b"), "templates": ("{}",), "splits": {"test": "test"}}
    source = DataSource(**fields, **content, processor=processor)
    (tmp_path / "data").mkdir()
    parquet(tmp_path / "data/pets", feature=PETS)
    write_sources(tmp_path / "data", {"pets": source})
    images = load_task(tmp_path / "data", "pets", "test", tmp_path)
    assert images.preprocess.settings["backend"] == processor
