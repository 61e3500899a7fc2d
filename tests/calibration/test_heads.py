"""Experts whose ends differ from the merged model's: heads of their own, other rows of words,
adapters in memory.
"""

import pytest
import torch
import transformers as tf
from families import FAMILIES, text
from tiny import PAPER, TEXT, averaged, difference, make, same_bits, shifted

from featcal import calibrate, compare, merge
from featcal.errors import FeatCalError
from featcal.models.load import load_model
from featcal.models.save import save_model
from reproduction.field.tune import distances

BERT = tf.BertConfig(**TEXT)


def classifier(labels, seed):
    config = tf.BertConfig(**TEXT, num_labels=labels)
    model = make(lambda: tf.BertForSequenceClassification(config), seed, torch.float32)
    model.bert = shifted(make(lambda: tf.BertModel(BERT), 0, torch.float32), seed, 0.05)
    return model


@pytest.fixture
def given():
    return {
        "base": make(lambda: tf.BertModel(BERT), 0, torch.float32),
        "experts": {"a": classifier(2, 1), "b": classifier(5, 2)},
        "batches": {"a": text(1), "b": text(2)},
    }


def folders(given, path):
    experts = {task: save_model(expert, path / task) for task, expert in given["experts"].items()}
    return given | {"base": save_model(given["base"], path / "base"), "experts": experts}


def test_towers_of_classifiers_are_merged_and_calibrated(given, tmp_path):
    towers = {task: expert.bert for task, expert in given["experts"].items()}
    said = []
    merged = merge("average", given["base"], given["experts"], progress=said.append)
    assert (
        same_bits(merged, merge("average", given["base"], towers))
        and "classifier.weight" in said[0]
    )
    expected = calibrate(merged, **given | {"experts": towers}, settings=PAPER).model
    assert same_bits(calibrate(merged, **given, settings=PAPER).model, expected)
    lying = folders(given, tmp_path)
    merge("average", lying["base"], lying["experts"], out=tmp_path / "merged")
    assert same_bits(load_model(tmp_path / "merged"), merged)
    calibrate(tmp_path / "merged", **lying, settings=PAPER, out=tmp_path / "out", held_out={})
    assert same_bits(load_model(tmp_path / "out"), expected)
    (near, *_) = compare({"out": tmp_path / "out"}, lying["experts"], given["batches"])
    assert near.kl is None and 0 < near.relative_drift < 1


def test_scores_of_experts_are_those_of_their_towers(given):
    towers = {task: expert.bert for task, expert in given["experts"].items()}
    base, batches = given["base"], given["batches"]
    merged = merge("average", base, towers)
    assert distances(merged, given["experts"], batches) == distances(merged, towers, batches)


def test_merged_classifier_keeps_the_head_of_the_base(given):
    base = classifier(3, 0)
    merged = merge("average", base, given["experts"])
    assert torch.equal(merged.classifier.weight, base.classifier.weight)
    mean = averaged([expert.bert for expert in given["experts"].values()])
    assert torch.equal(
        merged.bert.encoder.layer[1].output.dense.weight, mean.encoder.layer[1].output.dense.weight
    )
    result = calibrate(merged, **given | {"base": base}, settings=PAPER).model
    assert torch.equal(result.classifier.weight, base.classifier.weight) and not same_bits(
        result, merged
    )


def test_base_with_another_head_gives_its_tower(given, tmp_path):
    """The base that most classifiers come from is a masked language model."""
    masked = make(lambda: tf.BertForMaskedLM(BERT), 0, torch.float32)
    masked.bert.load_state_dict(given["base"].state_dict(), strict=False)
    lying = folders(given, tmp_path)
    save_model(masked, tmp_path / "masked")
    merge("average", lying["base"], lying["experts"], out=tmp_path / "merged")
    calibrate(tmp_path / "merged", **lying, settings=PAPER, out=tmp_path / "one")
    calibrate(
        tmp_path / "merged",
        **lying | {"base": tmp_path / "masked"},
        settings=PAPER,
        out=tmp_path / "other",
    )
    assert same_bits(load_model(tmp_path / "one"), load_model(tmp_path / "other"))


def test_experts_with_classes_are_merged_on_a_masked_language_model(tmp_path):
    """As most of RoBERTa's are; the head for words is the base's, and stays it."""
    config = tf.RobertaConfig(**TEXT, max_position_embeddings=16)
    base = make(lambda: tf.RobertaForMaskedLM(config), 0, torch.float32)
    experts = {
        t: make(lambda: tf.RobertaForSequenceClassification(config), i, torch.float32)
        for i, t in enumerate("ab", 1)
    }
    merged = merge("average", base, experts)
    mean = averaged([expert.roberta for expert in experts.values()])
    assert same_bits(merged.roberta, mean) and same_bits(merged.lm_head.dense, base.lm_head.dense)


def test_models_of_another_tower_are_refused(given):
    roberta = make(FAMILIES["roberta"].build, 0, torch.float32)
    with pytest.raises(FeatCalError):
        merge("average", given["base"], {"a": roberta})
    narrow = make(
        lambda: tf.BertModel(tf.BertConfig(**TEXT | {"intermediate_size": 48})), 0, torch.float32
    )
    with pytest.raises(FeatCalError, match="48"):
        calibrate(given["base"], **given | {"experts": {"a": narrow, "b": narrow}}, settings=PAPER)


def test_expert_with_a_larger_vocabulary_is_calibrated(given):
    experts = {task: expert.bert for task, expert in given["experts"].items()}
    merged = averaged(list(experts.values()))
    expected = calibrate(merged, **given | {"experts": experts}, settings=PAPER).model
    experts["a"].resize_token_embeddings(TEXT["vocab_size"] + 5)
    assert same_bits(
        calibrate(merged, **given | {"experts": experts}, settings=PAPER).model, expected
    )


def test_a_peft_model_in_memory_and_its_folder_are_the_expert_they_compute(given, tmp_path):
    peft = pytest.importorskip("peft")
    base = given["base"]
    how = peft.LoraConfig(
        r=2, target_modules=["query", "value"], init_lora_weights=False, bias="all"
    )
    adapted = peft.get_peft_model(make(lambda: tf.BertModel(BERT), 0, torch.float32), how)
    plain = peft.get_peft_model(make(lambda: tf.BertModel(BERT), 0, torch.float32), how)
    peft.set_peft_model_state_dict(plain, peft.get_peft_model_state_dict(adapted))
    adapted.save_pretrained(tmp_path / "adapter")
    whole, forms = plain.merge_and_unload(), (adapted, tmp_path / "adapter")
    # merge adds the adapter in float64
    assert difference(merge("average", base, {"a": adapted}), whole) < 1e-6
    batches = {"a": given["batches"]["a"]}
    expected, *result = [
        calibrate(base, base=base, experts={"a": e}, batches=batches, settings=PAPER).model
        for e in (whole, *forms)
    ]
    assert all(same_bits(model, expected) for model in result)
    with pytest.raises(FeatCalError, match="a LoRA adapter, not a model"):
        compare({"base": base}, {"a": tmp_path / "adapter"}, batches)
