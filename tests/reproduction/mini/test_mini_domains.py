"""The mini Llamas' texts: drawn the same again, splits apart, every reference answer right and
careless ones wrong.
"""

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from featcal.data.places import Location
from featcal.data.texts import load_text
from reproduction.language import answers
from reproduction.mini.language import domains
from reproduction.mini.language.domains import (
    DOMAINS,
    KINDS,
    TESTS,
    mixture,
    reading,
    training_items,
)
from reproduction.mini.language.exercises import split_of
from reproduction.mini.language.llama import (
    IGNORED,
    LONGEST,
    SHARES,
    SIZES,
    VOCABULARY,
    Recipe,
    Size,
    backward,
    encoded,
    padded,
    pretrain_llama,
    train_tokenizer,
)
from reproduction.mini.training import MODELS

SPLITS = ("train", "validation", "test")
TINY = Size(hidden=16, layers=2, heads=2, groups=1, mlp=32, tied=True)
SHORT = Recipe(TINY, steps=6, batch=8, facts=2, read=30, every=2)


@cache
def tokenizer():
    return train_tokenizer(reading(0, 300))


def right(key: str, item, answer: str) -> bool:
    return answers.CHECKS[TESTS[key].check](domains.test_row(key, item), answer)


@pytest.mark.parametrize("key", TESTS)
def test_a_test_drawn_twice_is_the_same_and_every_reference_passes_its_own_check(key):
    items = domains.test_items(key, "test", 60, 0)
    assert items == domains.test_items(key, "test", 60, 0) != domains.test_items(key, "test", 60, 1)
    assert items[:20] == domains.test_items(key, "test", 20, 0)
    assert len({item.prompt for item in items}) == 60
    assert all(right(key, item, f"{item.target}\n") for item in items)


@pytest.mark.parametrize("key", TESTS)
def test_an_empty_answer_and_another_rows_answer_fail(key):
    items = domains.test_items(key, "test", 40, 0)
    if TESTS[key].check != "program":
        assert not any(right(key, item, "") for item in items)
    swapped = [
        right(key, item, other.target)
        for item, other in zip(items, items[1:], strict=False)
        if item.target != other.target
    ]
    assert np.mean(swapped) < 0.35


def test_no_prompt_occurs_in_two_splits():
    for key, draw in KINDS.items():
        rng = np.random.default_rng(0)
        assert {split_of(draw(rng).prompt) for _ in range(300)} == set(SPLITS), key
    for domain, kinds in DOMAINS.items():
        seen = {item.prompt for item in training_items(domain, "train", 300, 0)}
        for key in kinds:
            held_out = [
                {item.prompt for item in domains.test_items(key, split, 60, 0)}
                for split in ("validation", "test")
            ]
            assert (
                not seen & held_out[0] and not seen & held_out[1] and not held_out[0] & held_out[1]
            )
    read = {prompt for prompt, _ in mixture(np.random.default_rng(0), SHARES, 0.5, 500)}
    assert {split_of(prompt) for prompt in read} == {"train"}


@pytest.mark.parametrize(
    ("answer", "target", "wanted"),
    [
        ("4+15=19", "4+15=19", True),
        ("19", "4+15=19", True),
        ("15-8=7 7-2=5\nand 9", "7-2=5", True),
        ("4+15=18", "4+15=19", False),
        ("7-2", "2", True),
        ("-2", "2", False),
        ("none", "2", False),
    ],
)
def test_the_last_number_counts(answer, target, wanted):
    assert answers.arithmetic({"target": target}, answer) is wanted


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ("(fig, pear) stop", True),
        ("(fig, pear) stop\nmore", True),
        ("(pear, fig) stop", False),
        ("(fig pear) stop", False),
        ("fig, pear stop", False),
        ("(fig, pear)", False),
        ("(fig, pear) stop.", False),
        ("(fig, pear, pear) stop", False),
        ("", False),
    ],
)
def test_every_instruction_must_be_fulfilled(answer, wanted):
    checks = [
        {"check": "words", "words": ["fig", "pear"]},
        {"check": "joined", "by": ", "},
        {"check": "wrapped", "left": "(", "right": ")"},
        {"check": "ends", "with": "stop"},
    ]
    assert answers.instructions({"instructions": json.dumps(checks)}, answer) is wanted


def test_nothing_is_unknown_to_the_tokenizer_and_a_prompt_is_a_beginning_of_the_whole():
    known = tokenizer()
    assert len(known) <= VOCABULARY and known.padding_side == "left"
    for text in ("naïve ∂x = 7\t", "日本 🙂", "def f(s):\n return s[::-1]\n"):
        assert known.decode(known(text)["input_ids"], skip_special_tokens=True) == text
    for key in KINDS:
        for prompt, completion in mixture(np.random.default_rng(1), {key: 1.0}, 0.5, 50):
            (ids, begin), alone = (
                encoded(known, [(prompt, completion)])[0],
                known(prompt)["input_ids"],
            )
            assert ids[:begin] == alone and len(ids) <= LONGEST


def test_labels_leave_out_prompt_and_padding_and_two_parts_give_the_gradient_of_one_batch():
    from reproduction.mini.language.llama import new_model

    texts = [([1, 5, 6, 7], 2), ([1, 8, 9], 1), ([1, 5, 9, 7, 6, 8], 3)]
    batch = padded(texts, 0)
    learnt = [[6, 7], [8, 9], [7, 6, 8]]
    assert [row[row != IGNORED].tolist() for row in batch["labels"]] == learnt
    assert (batch["labels"] != IGNORED).nonzero()[:, 1].tolist() == [2, 3, 1, 2, 3, 4, 5]
    model = new_model(TINY, 0)
    loss = backward(model, texts, 0)
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    whole = sum(
        model(**padded([text], 0)).loss * n**0.5 for text, n in zip(texts, (2, 2, 3), strict=True)
    ) / (2 * 2**0.5 + 3**0.5)
    whole.backward()
    assert loss == pytest.approx(whole.item(), rel=1e-5)
    assert all(
        torch.allclose(found[name], p.grad, atol=1e-6) for name, p in model.named_parameters()
    )


def test_an_interrupted_pre_training_ends_in_the_same_bytes(tmp_path, monkeypatch):
    from reproduction.mini.language import llama as module

    pretrain_llama("whole", tmp_path / "whole", state_folder=tmp_path / "a", recipe=SHORT)
    real, steps = module._Run.step, []

    def interrupted(run):
        if len(steps) == 3:
            raise KeyboardInterrupt
        steps.append(1)
        return real(run)

    monkeypatch.setattr(module._Run, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pretrain_llama("again", tmp_path / "again", state_folder=tmp_path / "a", recipe=SHORT)
    monkeypatch.undo()
    pretrain_llama("again", tmp_path / "again", state_folder=tmp_path / "a", recipe=SHORT)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "again")]
    assert weights[0] == weights[1] and not list((tmp_path / "a").rglob("*.safetensors"))
    pretrain_llama(
        "other", tmp_path / "other", state_folder=tmp_path / "a", recipe=replace(SHORT, seed=1)
    )
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != weights[0]


def test_files_hold_what_was_drawn_and_have_the_same_bytes_again(tmp_path):
    for name in ("a", "b"):
        domains.write_domain("coding", tmp_path / name / "coding", 0, {"train": 6, "validation": 2})
        for key in TESTS:
            domains.write_test(key, tmp_path / name / key, 0, {"test": 3})
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.parquet"))
    assert len(files) == 8
    assert all(
        (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes()
        for path in files
    )
    samples = load_text(Location(str(tmp_path / "a" / "coding")), "train")
    items = training_items("coding", "train", 6, 0)
    assert [(samples[i].text, samples[i].target) for i in range(6)] == [
        (item.prompt, f"{item.target}\n") for item in items
    ]
    for key in TESTS:
        rows = pq.read_table(tmp_path / "a" / key / "test.parquet").to_pylist()
        assert rows == [
            domains.test_row(key, item) for item in domains.test_items(key, "test", 3, 0)
        ]


@pytest.mark.parametrize("role", SIZES)
def test_the_bases_that_ship_load_with_their_tokenizer_and_answer_in_one_line(role):
    model = LlamaForCausalLM.from_pretrained(MODELS / role).eval()
    known = AutoTokenizer.from_pretrained(MODELS / role)
    assert model.dtype == torch.float32 and model.config.vocab_size >= len(known)
    assert model.config.tie_word_embeddings is SIZES[role].tied
    prompts = [item.prompt for item in domains.test_items("math500", "validation", 8, 0)]
    batch = known(prompts, padding=True, return_tensors="pt")
    out = model.generate(**batch, max_new_tokens=TESTS["math500"].new_tokens)
    said = known.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    assert all(answer.endswith("\n") and answer.count("\n") == 1 for answer in said)
