"""Draws, and batches that equal what the tokenizer pads itself."""

from zlib import crc32

import numpy as np
import pytest
import torch
from language import WORDS, jsonl, tokenizer
from test_texts import PAIRS, batches

from featcal.data.batches import collate, cut, draw_indices
from featcal.data.texts import ModelInput, TokenizedText

TARGETS = ModelInput("pair", labels=False, start=0)
MASKS = ("attention_mask", "decoder_attention_mask")


def test_a_draw_depends_on_task_and_seed_only_and_begins_with_a_smaller_one():
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = draw_indices("mnist", 1000, 50, 0)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])
    key = [0, crc32(b"mnist"), crc32(b"calibration")]
    assert np.array_equal(first, np.random.default_rng(key).permutation(1000)[:50])
    for task, seed in (("svhn", 0), ("mnist", 1)):
        assert not np.array_equal(first, draw_indices(task, 1000, 50, seed))
    whole = draw_indices("mnist", 1000, 1000, 0)
    assert np.array_equal(first, whole[:50]) and sorted(whole) == list(range(1000))


@pytest.mark.parametrize("most", [1.0, 1.2, float("inf")])
def test_batches_are_as_long_as_computed_tokens_per_counting_token_allow(most):
    lengths = [(9, 2), (9, 1), (8, 4), (5, 1), (4, 1), (4, 1), (4, 1)]
    texts = [TokenizedText([1] * length, [1] * target) for length, target in lengths]
    parts = cut(texts, 3, most)

    def count(text):
        return len(text.ids) + len(text.target)

    assert [text for part in parts for text in part] == texts
    for part, following in zip(parts, [*parts[1:], []], strict=True):
        masks = [collate(part, 0, TARGETS)[name] for name in MASKS]
        counting = sum(map(count, part))
        assert len(part) <= 3 and counting == sum(int(mask.sum()) for mask in masks)
        assert sum(mask.numel() for mask in masks) <= most * counting
        longer = collate([*part, *following[:1]], 0, TARGETS)  # one more would be too many
        computed = sum(longer[name].numel() for name in MASKS)
        assert not following or len(part) == 3 or computed > most * (counting + count(following[0]))


def test_a_model_with_a_decoder_is_given_targets_that_are_ignored_at_padding(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", PAIRS)
    made = batches(path, ModelInput("pair"))
    labels = next(iter(made))["labels"]
    longest = max(len(f"say {word}") for word in WORDS) + 1
    assert (made.samples, made.longest) == (len(WORDS), longest)
    ordered = sorted(WORDS, key=lambda text: -len(text))
    want = tokenizer()(text_target=ordered[:3], padding=True, return_tensors="pt")
    assert torch.equal(labels, want["input_ids"].masked_fill(want["attention_mask"] == 0, -100))
    bare = next(iter(batches(path, TARGETS)))
    assert torch.equal(bare["decoder_input_ids"][:, 0], torch.zeros(3, dtype=torch.long))
    assert torch.equal(bare["decoder_input_ids"][0, 1:], labels[0, :-1])
    assert torch.equal(bare["decoder_attention_mask"], want["attention_mask"])
