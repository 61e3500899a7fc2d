"""The drawn GLUE, the tokenizer of the small T5 models, their pre-training, and the two bases that
come with the package.
"""

import pyarrow.parquet as pq
import pytest
import torch

from featcal.models.load import load_model, load_tokenizer
from reproduction.mini.language import t5 as pretraining
from reproduction.mini.language.glue import SHARES, WORLDS, draw_rows, draw_samples, write_glue
from reproduction.mini.language.t5 import (
    SPECIAL,
    T5_SIZES,
    T5Recipe,
    T5Size,
    pretrain_t5,
    prompt_parts,
)
from reproduction.mini.training import MODELS
from reproduction.prepare.fine_tune import fine_tune_text
from reproduction.prepare.suite import FineTuneText
from reproduction.prepare.text_tasks import GLUE, prompted

TINY = T5Size(width=16, layers=1, heads=2, head_width=8, inner=24)
SHORT = T5Recipe(TINY, steps=4, rows=2, every=2)
ODD = (
    "",
    " ",
    "naïve — 日本語 🙂\n\ttabs",
    "\x00\x7f",
    "A b.",
    "' and '",
    "</s",
    "'the' \"x\"",
    "ﬁ é é",
    "1234567 4.5",
)


def texts(row):
    return tuple(value for name, value in row.items() if name not in ("label", "idx"))


@pytest.mark.parametrize("task", WORLDS)
def test_rows_have_glues_columns_and_a_longer_split_begins_with_the_shorter(task):
    rows = draw_rows(task, "train", 60, 0)
    assert set(rows[0]) == {*GLUE[task].columns, "label", "idx"}
    assert draw_rows(task, "train", 20, 0) == rows[:20]
    assert draw_rows(task, "train", 20, 1) != rows[:20]


@pytest.mark.parametrize("task", WORLDS)
def test_no_text_occurs_in_two_splits(task):
    seen = [{texts(row) for row in draw_rows(task, split, 400, 0)} for split in SHARES]
    assert sum(map(len, seen)) == len(set.union(*seen))


def test_parquet_files_hold_the_drawn_rows_and_have_the_same_bytes_again(tmp_path):
    for folder in ("a", "b"):
        for task in ("rte", "stsb"):
            write_glue(task, tmp_path / folder / task, 0, {"train": 8, "test": 4})
    for path in (tmp_path / "a").rglob("*.parquet"):
        assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes()
    for task in ("rte", "stsb"):
        stored = pq.read_table(tmp_path / "a" / task / "test.parquet").to_pylist()
        drawn = draw_samples(task, "test", 4, 0)
        assert [prompted(task, row) for row in stored] == [
            (sample.text, sample.target) for sample in drawn
        ]


def test_nothing_is_unknown_to_the_tokenizer_and_every_text_comes_back():
    tokenizer = load_tokenizer(MODELS / "flan_t5_base")
    for text in ODD:
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids and ids[-1] == tokenizer.eos_token_id == 1
        assert tokenizer.decode(ids[:-1], clean_up_tokenization_spaces=False) == text
    assert (
        tokenizer.convert_ids_to_tokens([0, 1, 2]) == list(SPECIAL) and tokenizer.pad_token_id == 0
    )
    assert all(
        len(tokenizer(part, add_special_tokens=False)["input_ids"]) == 1 for part in prompt_parts()
    )


def test_interrupted_pretraining_ends_in_the_same_bytes(tmp_path, monkeypatch):
    pretrain_t5("whole", tmp_path / "whole", tmp_path / "state", SHORT)
    step = pretraining._Run.step

    def interrupted(run):
        if run.done == 3:
            raise KeyboardInterrupt
        return step(run)

    monkeypatch.setattr(pretraining._Run, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pretrain_t5("whole", tmp_path / "halves", tmp_path / "state", SHORT)
    monkeypatch.setattr(pretraining._Run, "step", step)
    pretrain_t5("whole", tmp_path / "halves", tmp_path / "state", SHORT)
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "halves" / path.name).read_bytes(), path.name
    assert not list((tmp_path / "state").rglob("*.safetensors"))


@pytest.mark.parametrize("role", T5_SIZES)
def test_a_shipped_base_loads_in_float32_and_an_expert_of_a_few_steps_gains_on_it(role):
    base, tokenizer = load_model(MODELS / role), load_tokenizer(MODELS / role)
    assert base.dtype == torch.float32 and base.config.vocab_size == len(tokenizer)
    assert base.config.d_model == T5_SIZES[role].width and not base.config.scale_decoder_outputs
    train, held_out = (
        draw_samples("mnli", "train", 512, 0),
        draw_samples("mnli", "validation", 64, 0),
    )
    expert = fine_tune_text(
        MODELS / role, train, FineTuneText(steps=40, batch=16, lr=1e-3), "mnli", 0
    )
    assert loss(expert, tokenizer, held_out) < 0.8 * loss(base, tokenizer, held_out)


@torch.no_grad()
def loss(model, tokenizer, samples):
    given = tokenizer([sample.text for sample in samples], padding=True, return_tensors="pt")
    labels = tokenizer(text_target=[sample.target for sample in samples], return_tensors="pt")[
        "input_ids"
    ]
    return float(model(**given, labels=labels).loss)
