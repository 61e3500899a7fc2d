"""Features before a head: projected features of images, hidden states of texts."""

import pytest
import torch
import transformers as tf
from families import FAMILIES
from families import experiment as texts
from tiny import clip, images

from featcal.errors import BadSetting
from featcal.models.batch import padding_mask, rows_before_head


def test_a_function_as_head_equals_its_weight():
    model, batch = clip(), images(0)[0]
    layer = torch.nn.Linear(32, 8, bias=False).double()
    heads = (layer, layer.weight, {"visual_projection": layer.weight})
    first, *others = (rows_before_head(model, batch, head)[0] for head in heads)
    assert all(torch.equal(first, rows) for rows in others)


def test_decoder_tokens_that_are_padding_do_not_count():
    model, batch = texts(FAMILIES["t5"])["merged"], FAMILIES["t5"].batches(5)[0]
    given = {key: value for key, value in batch.items() if key != "labels"}
    given["decoder_input_ids"] = torch.tensor([[0, 5, 6, 0], [0, 7, 0, 0], [0, 8, 9, 4]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    rows, sizes = rows_before_head(model, given, None)
    masked, _ = rows_before_head(model, given | {"decoder_attention_mask": mask}, None)
    assert sizes.tolist() == [3, 2, 4]
    torch.testing.assert_close(rows, masked, rtol=0, atol=1e-12)


@pytest.mark.parametrize("key", ["decoder_inputs_embeds", "labels", None])
def test_a_decoder_that_reads_the_text_again_has_its_mask(key):
    hidden, mask = torch.zeros(2, 3, 4), torch.tensor([[1, 1, 0], [1, 1, 1]])
    given = {"attention_mask": mask, key: hidden if key == "decoder_inputs_embeds" else mask[0, :2]}
    expected = None if key == "decoder_inputs_embeds" else mask
    assert padding_mask(given, hidden, "decoder_attention_mask") is expected


def test_a_mask_of_pairs_leaves_out_tokens_that_none_sees():
    pairs, hidden = torch.ones(1, 1, 3, 3).index_fill(3, torch.tensor(2), 0), torch.zeros(1, 3, 4)
    for mask in (pairs.long(), pairs > 0, (pairs - 1) * 1e9):  # floats are added to scores
        assert padding_mask({"attention_mask": mask}, hidden).tolist() == [[True, True, False]]


@pytest.mark.parametrize(("kind", "end"), [("LED", 0), ("LayoutLMv3", 1), ("VisualBert", None)])
def test_a_shorter_mask_is_followed_by_padding_or_by_the_patches_of_a_page(kind, end):
    mask, hidden = torch.tensor([[1, 1, 1], [1, 0, 0]]), torch.zeros(2, 4, 8)
    model, page = torch.nn.Module(), {"bbox": 0, "pixel_values": 0} if end else {}
    model.config = getattr(tf, f"{kind}Config")()
    found = padding_mask({"attention_mask": mask} | page, hidden, model=model)
    expected = None if end is None else [[1, 1, 1, end], [1, 0, 0, end]]
    assert (None if found is None else found.tolist()) == expected


def test_the_mask_of_a_sound_counts_its_frames_but_not_those_of_an_adapter_or_a_text():
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    model = tf.Wav2Vec2Model(tf.Wav2Vec2Config(**sizes))
    frames = [model.feature_extractor(torch.zeros(1, n)).shape[2] for n in (4000, 1700)]
    mask = (torch.arange(4000) < torch.tensor([[4000], [1700]])).long()
    found = padding_mask({"attention_mask": mask}, torch.zeros(2, frames[0], 8), model=model)
    assert found.sum(1).tolist() == frames and frames[0] > frames[1]
    model.config.add_adapter, text = True, {"attention_mask": mask[:, :9]}  # blocks come before it
    assert padding_mask(text, torch.zeros(2, 9, 8), model=model) is text["attention_mask"]


def test_heads_that_do_not_fit_are_refused():
    with pytest.raises(BadSetting, match=r"head: \(8, 31\) .* must have shape \(p, 32\)"):
        rows_before_head(clip(), images(0)[0], torch.zeros(8, 31))
    llama, batch = texts(FAMILIES["llama"])["merged"], FAMILIES["llama"].batches(5)[0]
    with pytest.raises(BadSetting, match="head: 'Tensor' cannot be used; it must be left out"):
        rows_before_head(llama, batch, torch.zeros(4, 32))
