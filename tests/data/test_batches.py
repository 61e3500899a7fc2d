"""Draws, and batches that equal what the tokenizer pads itself."""

import language
import pytest
import torch
from language import WORDS, jsonl, tokenizer
from test_texts import PAIRS, batches

from featcal.cli.models import skeleton
from featcal.data.batches import Draw, batch, cut, draw_indices, drawn
from featcal.data.places import Place
from featcal.data.texts import Input, Tokens
from featcal.errors import BadSetting

TARGETS = Input("pair", labels=False, start=0)


@pytest.mark.parametrize("most", [1.0, 1.2, float("inf")])
def test_batches_end_before_they_compute_more_than_was_allowed_for_each_token_that_counts(most):
    lengths = [(9, 2), (9, 1), (8, 4), (5, 1), (4, 1), (4, 1), (4, 1)]
    texts = [Tokens([1] * length, [1] * target) for length, target in lengths]
    parts = cut(texts, 3, most)
    assert [text for part in parts for text in part] == texts
    made = [batch(part, 0, TARGETS) for part in parts]
    for part, each, following in zip(parts, made, [*parts[1:], []], strict=True):
        masks = [each[name] for name in ("attention_mask", "decoder_attention_mask")]
        real = sum(text.count for text in part)
        assert len(part) <= 3 and real == sum(int(mask.sum()) for mask in masks)
        assert sum(mask.numel() for mask in masks) <= most * real
        longer = batch([*part, *following[:1]], 0, TARGETS)  # and not a text earlier
        computed = sum(
            longer[name].numel() for name in ("attention_mask", "decoder_attention_mask")
        )
        assert not following or len(part) == 3 or computed > most * (real + following[0].count)


def test_batches_equal_what_the_tokenizer_pads_itself_longest_first(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(WORDS))
    made = batches(tmp_path / "a.txt", Input("text"))
    ordered = sorted(WORDS, key=lambda text: -len(text))
    own = tokenizer()
    for i, each in enumerate(made):
        want = own(
            ordered[3 * i : 3 * i + 3], padding=True, padding_side="right", return_tensors="pt"
        )
        assert all(torch.equal(each[name], want[name]) for name in ("input_ids", "attention_mask"))
    again = list(made)
    assert len(again) == 3 and torch.equal(again[0]["input_ids"], next(iter(made))["input_ids"])
    assert (made.samples, made.longest) == (9, len(ordered[0]) + 1)


def test_a_model_with_a_decoder_is_given_targets_that_are_ignored_at_padding(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", PAIRS)
    labels = [batch["labels"] for batch in batches(path, Input("pair"))]
    ordered = sorted(WORDS, key=lambda text: -len(text))
    want = tokenizer()(text_target=ordered[:3], padding=True, return_tensors="pt")
    assert torch.equal(labels[0], want["input_ids"].masked_fill(want["attention_mask"] == 0, -100))
    bare = next(iter(batches(path, Input("pair", labels=False, start=0))))
    assert torch.equal(bare["decoder_input_ids"][:, 0], torch.zeros(3, dtype=torch.long))
    assert torch.equal(bare["decoder_input_ids"][0, 1:], labels[0][0, :-1])
    assert torch.equal(bare["decoder_attention_mask"], want["attention_mask"])


def test_the_draw_of_a_task_is_the_one_that_images_have_too(tmp_path):
    folder = language.folder(tmp_path / "bert", "bert")
    (tmp_path / "a.txt").write_text("\n".join(WORDS))
    made = drawn(skeleton(folder), [folder], {"x": Place(tmp_path / "a.txt")}, Draw(4, 7, 4))["x"]
    want = {tuple(tokenizer()(WORDS[i])["input_ids"]) for i in draw_indices("x", len(WORDS), 4, 7)}
    rows = [
        row for each in made for row in zip(each["input_ids"], each["attention_mask"], strict=True)
    ]
    assert {tuple(ids[mask == 1].tolist()) for ids, mask in rows} == want
    with pytest.raises(BadSetting, match="at most 9, the number of samples of x"):
        drawn(skeleton(folder), [folder], {"x": Place(tmp_path / "a.txt")}, Draw(10, 7, 4))
