"""Features before a head: projected features of images, hidden states of texts, and adapters set
there.
"""

import pytest
import torch
from adapter_features import difference
from families import FAMILIES, without_float32
from families import experiment as texts
from tiny import clip, images

import featcal
from featcal.baselines.training import together
from featcal.errors import BadBatches, BadSetting
from featcal.models.batch import single_samples
from featcal.models.features import rows_before_head

LANGUAGE = ("t5", "t5_gated", "llama")


def call(given):
    return given["merged"], given["experts"], given["batches"]


def counted(batch):
    return batch["labels"] != -100 if "labels" in batch else batch["attention_mask"].bool()


def test_a_function_as_head_equals_its_weight():
    model, batch = clip(), images(0)[0]
    layer = torch.nn.Linear(32, 8, bias=False).double()
    heads = (layer, layer.weight, {"visual_projection": layer.weight})
    first, *others = (rows_before_head(model, batch, head)[0] for head in heads)
    assert all(torch.equal(first, rows) for rows in others)


@pytest.mark.parametrize("name", LANGUAGE)
def test_rows_of_a_text_are_what_the_language_head_reads(name):
    model, batch = texts(FAMILIES[name])["merged"], FAMILIES[name].batches(5)[0]
    rows, sizes = rows_before_head(model, batch, None)
    with torch.no_grad():
        logits, want = model.get_output_embeddings()(rows), model(**batch).logits[counted(batch)]
    torch.testing.assert_close(logits, want, rtol=0, atol=1e-12)
    assert sizes.tolist() == counted(batch).sum(1).tolist()


def test_decoder_tokens_that_are_padding_do_not_count():
    model, batch = texts(FAMILIES["t5"])["merged"], FAMILIES["t5"].batches(5)[0]
    given = {key: value for key, value in batch.items() if key != "labels"}
    given["decoder_input_ids"] = torch.tensor([[0, 5, 6, 0], [0, 7, 0, 0], [0, 8, 9, 4]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    rows, sizes = rows_before_head(model, given, None)
    masked, _ = rows_before_head(model, given | {"decoder_attention_mask": mask}, None)
    assert sizes.tolist() == [3, 2, 4]
    torch.testing.assert_close(rows, masked, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LANGUAGE)
def test_texts_of_several_lengths_have_the_same_features_in_one_batch(name):
    model, (first, second) = (
        texts(FAMILIES[name])["merged"],
        [FAMILIES[name].batches(seed)[0] for seed in (5, 6)],
    )
    # without padding
    shorter = {key: value[1:2, : 2 if key == "labels" else 4] for key, value in second.items()}
    joined = together("a", [*single_samples([first]), shorter])
    rows, sizes = rows_before_head(model, joined, None)
    alone = [rows_before_head(model, part, None) for part in (first, shorter)]
    want, counts = (torch.cat(parts) for parts in zip(*alone, strict=True))
    torch.testing.assert_close(rows, want, rtol=0, atol=1e-6)  # norms are float32
    assert sizes.tolist() == counts.tolist()


def test_texts_of_several_lengths_without_a_mask_are_refused():
    with pytest.raises(BadBatches, match="texts differ in length; give an attention_mask"):
        together("a", [{"input_ids": torch.ones(1, n, dtype=torch.long)} for n in (3, 5)])


@pytest.mark.parametrize("name", LANGUAGE)
def test_adapters_of_a_language_model_correct_the_input_of_its_head(name):
    given = texts(FAMILIES[name])
    model, batch = given["merged"], FAMILIES[name].batches(5)[0]
    adapters = featcal.surgery(*call(given), rank=4, steps=20, lr=0.01)
    rows, _ = rows_before_head(model, batch, None)
    with torch.no_grad():
        plain = model(**batch).logits
        with adapters.before_head(model, "a"):
            logits = model(**batch).logits[counted(batch)]
        want = model.get_output_embeddings()(adapters.apply("a", rows))
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-12)
        assert torch.equal(model(**batch).logits, plain)
    assert (want - plain[counted(batch)]).abs().max() > 1e-3


@pytest.mark.parametrize("name", LANGUAGE)
def test_texts_encoded_at_every_step_give_the_adapters_of_kept_features(name, monkeypatch):
    given = texts(FAMILIES[name])
    without_float32(monkeypatch, given["merged"])
    once, each = (
        featcal.surgery(*call(given), rank=4, steps=20, batch=4, encode=encode)
        for encode in ("once", "each_step")
    )
    assert difference(once, each) < 1e-9


def test_language_models_refuse_unit_features_and_a_second_head():
    given = texts(FAMILIES["llama"])
    with pytest.raises(BadSetting, match="surgery.features: .* must be raw for a language model"):
        featcal.surgery(*call(given), features="unit")
    with pytest.raises(BadSetting, match="head: 'Tensor' cannot be used; it must be left out"):
        featcal.surgery(*call(given), head=torch.zeros(4, 32), rank=2)
