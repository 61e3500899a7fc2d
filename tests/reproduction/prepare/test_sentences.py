"""Sentences: the project's own sets, the order of rows, and damage by row."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from encoders import encoder, task

from featcal.errors import BadFile, MissingPath, UnknownKey
from featcal.evaluation.accuracy import projected_features
from featcal.models.load import load_model
from pipeline import ROOT
from reproduction.prepare.damage import DAMAGES, damaged, dropped_words, swapped_words
from reproduction.prepare.sources import SPLITS, load_sentences, read_classes
from reproduction.prepare.suite import load_suite

REAL = ROOT / "reproduction" / "real_text"
TASKS = load_suite(ROOT, "mini").sentences.pools[20]


@pytest.mark.parametrize("name", TASKS)
def test_a_real_set_has_its_rows_its_licence_and_no_text_in_two_splits(name):
    tables = {split: pq.read_table(REAL / name / f"{split}.parquet") for split in SPLITS}
    assert [len(tables[split]) for split in ("validation", "test", "stream")] == [300, 500, 500]
    texts = [set(table["text"].to_pylist()) for table in tables.values()]
    assert sum(map(len, texts)) == len(set.union(*texts))
    classes = read_classes(REAL / name).classes
    # an expert sees every class
    assert set(tables["train"]["label"].to_pylist()) == set(range(len(classes)))
    lines = (REAL / name / "README.md").read_text().splitlines()
    licence = next(line for line in lines if line.startswith("- licence: "))
    notice = (ROOT / "NOTICE").read_text().split("\n\n")[2].split("\n  licence: ")
    entry = next(part for part in notice if name in part)
    assert ("SHARE-ALIKE" in entry.rpartition(name)[2].partition("\n")[0]) == ("-SA" in licence)


@pytest.fixture
def sentences(tmp_path):
    return load_sentences(task(tmp_path / "colours"), "train", encoder(tmp_path / "encoder"))


def test_rows_stand_by_length_with_their_own_labels_and_so_does_what_is_taken(sentences, tmp_path):
    written = pq.read_table(tmp_path / "colours/train.parquet")
    for some in (sentences, sentences.take([40, 3, 17])):
        lengths = [len(ids) for ids in some.ids]
        assert lengths == sorted(lengths)
        assert [written["text"][row].as_py() for row in some.rows.tolist()] == list(some.texts)
        assert [written["label"][row].as_py() for row in some.rows.tolist()] == some.labels.tolist()
    assert len(sentences.take([40, 3, 17])) == 3


def test_batches_follow_the_indices_and_their_padding_is_in_no_feature(sentences, tmp_path):
    (batch,) = sentences.batches([50, 2], 8)
    for ids, mask, index in zip(batch["input_ids"], batch["attention_mask"], (50, 2), strict=True):
        assert ids[mask.bool()].tolist() == sentences.ids[index]
    assert batch["attention_mask"].shape[1] == len(sentences.ids[50])
    model = load_model(tmp_path / "encoder")
    with torch.no_grad():
        alone = [model(torch.tensor([sentences.ids[i]])).last_hidden_state for i in (50, 2)]
    expected = torch.cat([hidden.mean(1) for hidden in alone])
    assert torch.allclose(projected_features(model, None, batch), expected, atol=1e-5)
    assert sum(len(part["input_ids"]) for part in sentences.batches(None, 7)) == len(sentences)


def test_what_is_missing_of_a_task_is_named(tmp_path):
    folder, model = task(tmp_path / "colours"), encoder(tmp_path / "encoder")
    with pytest.raises(UnknownKey, match="did you mean 'stream'"):
        load_sentences(folder, "strem", model)
    (folder / "stream.parquet").unlink()
    with pytest.raises(MissingPath, match="stream.parquet"):
        load_sentences(folder, "stream", model)
    (folder / "labels.json").write_text('{"classes": ["red"], "templates": ["{}"]}')
    with pytest.raises(BadFile, match="label outside of 0 … 0"):
        load_sentences(folder, "test", model)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_keeps_rows_and_labels_and_depends_on_the_row_alone(sentences, damage):
    sets = (sentences, sentences.take([5, 30]))
    all_damaged, part = (damaged(some, "colours", damage, 3, 0) for some in sets)
    assert part.texts == (all_damaged.texts[5], all_damaged.texts[30])
    assert (all_damaged.labels == sentences.labels).all() and all_damaged.texts != sentences.texts
    for key in (("sky", damage, 3, 0), ("colours", damage, 2, 0), ("colours", damage, 3, 1)):
        assert damaged(sentences, *key).texts != all_damaged.texts
    assert all_damaged.batch([5])["input_ids"].tolist() == [all_damaged.ids[5]]


def test_stronger_damage_changes_more():
    text, draw = "one two three four five six seven eight nine ten " * 200, np.random.default_rng
    tokens, moved = text.split(), []
    for share in (0.1, 0.2, 0.4):
        remaining = len(dropped_words(text, share, draw(0)).split())
        assert remaining == pytest.approx((1 - share) * len(tokens), rel=0.05)
        swapped = swapped_words(text, share, draw(0)).split()
        moved.append(sum(a != b for a, b in zip(tokens, swapped, strict=True)))
        assert sorted(swapped) == sorted(tokens)
    assert moved == sorted(moved) and dropped_words("alone", 1.0, draw(0)) == "alone"
