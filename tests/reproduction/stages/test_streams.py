"""Stages keep drawn images as bytes in memory, never whole splits as floats."""

import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import checkpoints
import numpy as np
import pytest
import torch
from checkpoints import picture
from test_images import PETS, encoded, parquet

from featcal.baselines.training import InMemorySamples, samples_of
from featcal.data.batches import draw_indices
from featcal.data.images import ImageSet, load_images
from featcal.errors import BadBatches
from featcal.models.batch import single_samples
from reproduction.engine import samples as streams
from reproduction.engine.context import Setup
from reproduction.experiments import SampleDraw
from reproduction.prepare import sources
from reproduction.prepare.sources import Split, mapped_images

SIDE = 32
PLAIN = checkpoints.plain(SIDE)
PICTURE = 3 * SIDE * SIDE  # bytes


@pytest.fixture
def context(monkeypatch):
    """Return two tasks of 40 pictures."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 3, SIDE, SIDE), dtype=np.uint8)
    images = ImageSet(pixels, PLAIN, np.zeros(40, np.int64), ("a",))
    monkeypatch.setattr(streams, "load_task", lambda *_: images)
    groups = dict.fromkeys(("sentences", "photos"), SimpleNamespace(roles={}))
    suite = SimpleNamespace(tasks_of=lambda role, pool: ("mnist", "dtd"), **groups)
    return Setup(SimpleNamespace(suite=suite, root=Path(), outputs=Path()), "clip_b32", 8), images


def test_a_draw_holds_one_byte_a_value_and_gives_what_the_split_would(context):
    setup, images = context
    ten = SampleDraw(stream="train", samples=10, batch=4)
    for task, draw in streams.streams(setup, ten).items():
        assert draw.samples.pixels.nbytes == 10 * PICTURE
        expected = list(images.batches(draw_indices(task, 40, 10, 42), 4))
        for _ in range(2):  # every iteration is the same
            batches = list(draw)
            assert [len(b["pixel_values"]) for b in batches] == [4, 4, 2]
            for batch, want in zip(batches, expected, strict=True):
                assert torch.equal(batch["pixel_values"], want["pixel_values"])
    black = replace(setup, change=lambda _, samples: replace(samples, pixels=0 * samples.pixels))
    assert len(next(iter(streams.stream(black, "dtd", ten)))["pixel_values"].unique()) == 1


@pytest.mark.parametrize("samples", [None, 30])
def test_adapters_that_encode_every_batch_hold_no_more_than_a_batch_as_numbers(context, samples):
    setup, images = context
    pictures = len(images) if samples is None else samples
    draw = SampleDraw(stream="train", samples=samples, batch=4)
    expected = InMemorySamples("dtd", single_samples(streams.stream(setup, "dtd", draw)))
    tracemalloc.start()
    actual = samples_of("dtd", streams.stream(setup, "dtd", draw))
    batches = [actual.batch(indices)["pixel_values"] for indices in ([7, 3, 11, 3], [0])]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(actual) == len(expected) == pictures
    # a draw is held as bytes, a split stays where it is
    in_memory = 0 if samples is None else pictures * PICTURE
    assert peak < in_memory + 10 * 4 * PICTURE < 4 * pictures * PICTURE
    for indices, batch in zip(([7, 3, 11, 3], [0]), batches, strict=True):
        assert torch.equal(batch, expected.batch(indices)["pixel_values"])


def test_an_adapter_without_samples_is_refused_whatever_holds_them(context):
    _, images = context
    images = replace(images, pixels=images.pixels[:0], labels=images.labels[:0])
    message = r"batches\['dtd'\]: is empty; an adapter needs at least one sample"
    for batches in (streams.SampleStream(images, 4), []):
        with pytest.raises(BadBatches, match=message):
            samples_of("dtd", batches)


def pets(folder, count):
    pictures = [encoded(picture(seed=seed)) for seed in range(count)]
    return parquet(folder, labels=[0, 1] * (count // 2), feature=PETS, image=pictures)


def test_decoding_into_the_cache_holds_a_few_chunks_however_large_the_split(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 2 * PICTURE)
    split = Split(pets(tmp_path / "pets", 120), "test", PLAIN, whole=True)
    encoded_bytes = sum(file.stat().st_size for file in (tmp_path / "pets").iterdir())
    mapped_images(tmp_path / "first", split)  # imports, tables
    tracemalloc.start()
    images = mapped_images(tmp_path / "decoded", split)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(images) == 120 and peak < 120 * PICTURE / 2 + 2 * encoded_bytes


def test_pictures_that_are_decoded_by_several_threads_stand_in_their_places(tmp_path, monkeypatch):
    folder = pets(tmp_path / "pets", 12)
    lazy = load_images(folder, "test", PLAIN, in_memory=0)
    one_by_one = np.concatenate([lazy.pixels[[row]] for row in range(12)])
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    assert np.array_equal(load_images(folder, "test", PLAIN).pixels, one_by_one)
