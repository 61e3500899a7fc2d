"""The mini suite draws the same again, its splits apart; its files are as drawn, answers judged."""

import io
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from featcal.data.places import Location
from featcal.data.texts import load_text
from reproduction.language import answers
from reproduction.mini import images as mini
from reproduction.mini.clip import image_processor, normalised
from reproduction.mini.images import TASKS, draw_split, shifted
from reproduction.mini.language import domains
from reproduction.mini.language.domains import DOMAINS, KINDS, TESTS, mixture, training_items
from reproduction.mini.language.exercises import split_of
from reproduction.mini.language.llama import SHARES
from reproduction.mini.language.worlds import WORLDS
from reproduction.prepare.tasks import GLUE, prompted


@pytest.mark.parametrize("key", TASKS)
def test_pictures_are_balanced_the_same_again_and_in_one_split(key):
    classes = len(TASKS[key].classes)
    images, labels = draw_split(key, "train", 2 * classes, 0, 0.5)
    assert images.shape == (2 * classes, 32, 32, 3) and images.dtype == np.uint8
    assert np.array_equal(images, draw_split(key, "train", 2 * classes, 0, 0.5)[0])
    assert np.bincount(labels).tolist() == [2] * classes
    sets = [{x.tobytes() for x in draw_split(key, split, 20, 0, 0.5)[0]} for split in mini.COUNTS]
    assert len(set.union(*sets)) == 60


def test_the_shift_belongs_to_the_task_and_spares_web_pictures():
    images, _ = draw_split("svhn", "web", 4, 0, 0.0)
    assert np.array_equal(shifted(images, "svhn", 0.0), images)
    assert not np.array_equal(shifted(images, "svhn", 0.5), shifted(images, "mnist", 0.5))
    assert np.array_equal(draw_split("svhn", "web", 4, 0, 0.5)[0], images)


def test_pixels_are_those_of_the_saved_processor():
    images, _ = draw_split("gtsrb", "web", 3, 0, 0.0)
    pictures = [Image.fromarray(image) for image in images]
    expected = image_processor()(pictures, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(normalised(images), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("task", WORLDS)
def test_rows_have_glues_columns_begin_with_a_shorter_split_and_are_in_one_split(task):
    rows = domains.draw_rows(task, "train", 60, 0)
    assert set(rows[0]) == {*GLUE[task].columns, "label", "idx"}
    again, other = (domains.draw_rows(task, "train", 20, seed) for seed in (0, 1))
    assert again == rows[:20] != other
    texts = []
    for split in domains.SHARES:
        rows = domains.draw_rows(task, split, 400, 0)
        texts.append({tuple(row[name] for name in GLUE[task].columns) for row in rows})
    assert sum(map(len, texts)) == len(set.union(*texts))


def test_files_hold_what_was_drawn_and_have_the_same_bytes_again(tmp_path):
    for folder in (tmp_path / "a", tmp_path / "b"):
        mini.write_parquet("pcam", folder / "pcam", 0, 0.5, {"train": 8, "test": 4})
        for task in ("rte", "stsb"):
            domains.write_glue(task, folder / task, 0, {"train": 8, "test": 4})
        domains.write_domain("coding", folder / "coding", 0, {"train": 6, "validation": 2})
        for key in TESTS:
            domains.write_test(key, folder / key, 0, {"test": 3})
    files = sorted((tmp_path / "a").rglob("*.parquet"))
    assert len(files) == 14
    for file in files:
        again = tmp_path / "b" / file.relative_to(tmp_path / "a")
        assert file.read_bytes() == again.read_bytes(), file

    def rows(name, split="test"):
        return pq.read_table(tmp_path / "a" / name / f"{split}.parquet").to_pylist()

    images, labels = draw_split("pcam", "test", 4, 0, 0.5)
    stored = [Image.open(io.BytesIO(row["image"]["bytes"])) for row in rows("pcam")]
    assert np.array_equal(np.stack([np.asarray(image) for image in stored]), images)
    assert [row["label"] for row in rows("pcam")] == labels.tolist()
    for task in ("rte", "stsb"):
        samples = domains.draw_samples(task, "test", 4, 0)
        assert [prompted(task, row) for row in rows(task)] == [(s.text, s.target) for s in samples]
    samples = load_text(Location(str(tmp_path / "a/coding")), "train")
    items = training_items("coding", "train", 6, 0)
    texts = [(samples[i].text, samples[i].target) for i in range(6)]
    assert texts == [(item.prompt, f"{item.target}\n") for item in items]
    for key in TESTS:
        items = domains.test_items(key, "test", 3, 0)
        assert rows(key) == [domains.test_row(key, item) for item in items]


def right(key: str, item, answer: str) -> bool:
    return answers.CHECKS[TESTS[key].check](domains.test_row(key, item), answer)


@pytest.mark.parametrize("key", TESTS)
def test_items_are_the_same_again_their_references_right_and_others_wrong(key):
    items = domains.test_items(key, "test", 60, 0)
    assert domains.test_items(key, "test", 20, 0) == items[:20]
    assert domains.test_items(key, "test", 60, 1) != items
    assert len({item.prompt for item in items}) == 60
    assert all(right(key, item, f"{item.target}\n") for item in items)
    assert not any(right(key, item, "") for item in items)
    pairs = [(a, b) for a, b in zip(items, items[1:], strict=False) if a.target != b.target]
    assert np.mean([right(key, item, other.target) for item, other in pairs]) < 0.35
    careless = [right(key, item, item.careless) for item in items if item.careless != item.target]
    assert not careless or np.mean(careless) <= 0.6


def test_no_prompt_is_in_two_splits():
    for key, draw in KINDS.items():
        rng = np.random.default_rng(0)
        splits = {split_of(draw(rng).prompt) for _ in range(300)}
        assert splits == {"train", "validation", "test"}, key
    for domain, kinds in DOMAINS.items():
        training = {item.prompt for item in training_items(domain, "train", 300, 0)}
        for key in kinds:
            prompts = set(training)
            for split in ("validation", "test"):
                items = {item.prompt for item in domains.test_items(key, split, 60, 0)}
                assert not prompts & items
                prompts |= items
    read = {prompt for prompt, _ in mixture(np.random.default_rng(0), SHARES, 0.5, 500)}
    assert {split_of(prompt) for prompt in read} == {"train"}


@pytest.mark.parametrize(
    ("answer", "target", "wanted"),
    [
        ("4+15=19", "4+15=19", True), ("19", "4+15=19", True), ("15-8=7 7-2=5\nand 9", "7-2=5", True),
        ("4+15=18", "4+15=19", False), ("7-2", "2", True), ("-2", "2", False), ("none", "2", False),
    ],
)  # fmt: skip
def test_the_last_number_counts(answer, target, wanted):
    assert answers.arithmetic({"target": target}, answer) is wanted


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ("(fig, pear) stop", True), ("(fig, pear) stop\nmore", True), ("(pear, fig) stop", False),
        ("(fig pear) stop", False), ("fig, pear stop", False), ("(fig, pear)", False),
        ("(fig, pear) stop.", False), ("(fig, pear, pear) stop", False), ("", False),
    ],
)  # fmt: skip
def test_every_instruction_must_be_fulfilled(answer, wanted):
    checks = [
        {"check": "words", "words": ["fig", "pear"]}, {"check": "joined", "by": ", "},
        {"check": "wrapped", "left": "(", "right": ")"}, {"check": "ends", "with": "stop"},
    ]  # fmt: skip
    assert answers.instructions({"instructions": json.dumps(checks)}, answer) is wanted
