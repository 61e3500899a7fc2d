"""What stands before a head: projected features of pictures, hidden states of texts, and adapters
set there.
"""

import pytest
import torch
from adapter_features import difference
from families import FAMILIES, without_float32
from families import experiment as texts
from tiny import clip, images

import featcal
from featcal.baselines.features import rows_before_head, together
from featcal.errors import BadBatches, BadSetting
from featcal.models.batch import single_samples

LANGUAGE = ("t5", "t5_gated", "llama")


def test_a_function_as_head_equals_its_weight():
    model, batch = clip(), images(0)[0]
    layer = torch.nn.Linear(32, 8, bias=False).double()
    by_layer = rows_before_head(model, batch, layer)[0]
    assert torch.equal(by_layer, rows_before_head(model, batch, layer.weight)[0])
    assert torch.equal(
        by_layer, rows_before_head(model, batch, {"visual_projection": layer.weight})[0]
    )


@pytest.mark.parametrize("name", LANGUAGE)
def test_rows_of_a_text_are_what_the_language_head_reads_at_tokens_that_count(name):
    family = FAMILIES[name]
    model, batch = texts(family)["merged"], family.batches(5)[0]
    rows, sizes = rows_before_head(model, batch, None)
    mask = (batch["labels"] != -100) if "labels" in batch else batch["attention_mask"].bool()
    with torch.no_grad():
        torch.testing.assert_close(
            model.get_output_embeddings()(rows), model(**batch).logits[mask], rtol=0, atol=1e-12
        )
    assert sizes.tolist() == mask.sum(1).tolist()


def test_a_decoder_given_its_tokens_counts_those_that_do_not_pad():
    model, batch = texts(FAMILIES["t5"])["merged"], FAMILIES["t5"].batches(5)[0]
    given = {key: value for key, value in batch.items() if key != "labels"}
    given["decoder_input_ids"] = torch.tensor([[0, 5, 6, 0], [0, 7, 0, 0], [0, 8, 9, 4]])
    rows, sizes = rows_before_head(model, given, None)
    masked = given | {
        "decoder_attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    }
    assert sizes.tolist() == [3, 2, 4]
    torch.testing.assert_close(rows, rows_before_head(model, masked, None)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LANGUAGE)
def test_texts_of_several_lengths_have_the_same_features_in_one_batch(name):
    model, parts = (
        texts(FAMILIES[name])["merged"],
        [FAMILIES[name].batches(seed)[0] for seed in (5, 6)],
    )
    shorter = {
        key: value[1:2, : 2 if key == "labels" else 4] for key, value in parts[1].items()
    }  # without padding
    joined = together("a", [*single_samples(parts[:1]), shorter])
    rows, sizes = rows_before_head(model, joined, None)
    apart = [rows_before_head(model, part, None) for part in (parts[0], shorter)]
    torch.testing.assert_close(
        rows, torch.cat([rows for rows, _ in apart]), rtol=0, atol=1e-6
    )  # norms are float32
    assert sizes.tolist() == torch.cat([sizes for _, sizes in apart]).tolist()


def test_texts_of_several_lengths_without_a_mask_are_refused():
    with pytest.raises(BadBatches, match="texts differ in length; give an attention_mask"):
        together("a", [{"input_ids": torch.ones(1, n, dtype=torch.long)} for n in (3, 5)])


@pytest.mark.parametrize("name", LANGUAGE)
def test_adapters_of_a_language_model_sit_before_its_head(name):
    given = texts(FAMILIES[name])
    model, batch = given["merged"], FAMILIES[name].batches(5)[0]
    adapters = featcal.surgery(model, given["experts"], given["batches"], rank=4, steps=20, lr=0.01)
    rows, _ = rows_before_head(model, batch, None)
    mask = (batch["labels"] != -100) if "labels" in batch else batch["attention_mask"].bool()
    with torch.no_grad():
        plain = model(**batch).logits
        with adapters.before_head(model, "a"):
            logits = model(**batch).logits[mask]
        want = model.get_output_embeddings()(adapters.apply("a", rows))
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-12)
        assert torch.equal(model(**batch).logits, plain)
    assert (want - plain[mask]).abs().max() > 1e-3


@pytest.mark.parametrize("name", LANGUAGE)
def test_texts_encoded_at_every_step_give_the_adapters_of_kept_features(name, monkeypatch):
    given = texts(FAMILIES[name])
    without_float32(monkeypatch, given["merged"])
    call = (given["merged"], given["experts"], given["batches"])
    once, each = (
        featcal.surgery(*call, rank=4, steps=20, batch=4, encode=how)
        for how in ("once", "each_step")
    )
    assert difference(once, each) < 1e-9


def test_language_models_refuse_unit_features_and_a_second_head():
    given = texts(FAMILIES["llama"])
    call = (given["merged"], given["experts"], given["batches"])
    with pytest.raises(
        BadSetting,
        match="surgery.features: 'unit' cannot be used; it must be raw for a language model",
    ):
        featcal.surgery(*call, features="unit")
    with pytest.raises(BadSetting, match="head: 'Tensor' cannot be used; it must be left out"):
        featcal.surgery(*call, head=torch.zeros(4, 32), rank=2)
