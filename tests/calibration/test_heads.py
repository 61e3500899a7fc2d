"""Experts that differ at the ends: own heads, other vocabularies, adapters in memory."""

import copy
import weakref

import pytest
import torch
import transformers as tf
from families import WIDE, text
from tiny import PAPER, TEXT, averaged, difference, images, make, same_bits, shifted
from torch import nn

from featcal import calibrate, compare, merge
from featcal.calibration.choose import divergences
from featcal.calibration.features import open_models
from featcal.errors import FeatCalError
from featcal.models.load import load_model, save_model
from featcal.models.lora import without_adapters

BERT = tf.BertConfig(**TEXT)


def classifier(labels, seed):
    config = tf.BertConfig(**TEXT, num_labels=labels)
    model = make(lambda: tf.BertForSequenceClassification(config), seed, torch.float32)
    model.bert = shifted(make(lambda: tf.BertModel(BERT), 0, torch.float32), seed, 0.05)
    return model


@pytest.fixture
def given():
    base = make(lambda: tf.BertModel(BERT), 0, torch.float32)
    own = {"experts": {"a": classifier(2, 1), "b": classifier(5, 2)}, "settings": PAPER}
    return own | {"base": base, "batches": {"a": text(1), "b": text(2)}}


def merged(given, **more):
    return merge("average", given["base"], given["experts"], **more)


def test_towers_of_classifiers_are_merged_scored_and_calibrated(given, tmp_path):
    towers, said = {task: expert.bert for task, expert in given["experts"].items()}, []
    alone = given | {"experts": towers}
    ours = merged(given, progress=said.append)
    assert same_bits(ours, merged(alone)) and "classifier.weight" in said[0]
    expected = calibrate(ours, **alone).model
    assert same_bits(calibrate(ours, **given).model, expected)
    # the base that most classifiers come from is a masked language model
    masked = make(lambda: tf.BertForMaskedLM(BERT), 0, torch.float32)
    masked.bert.load_state_dict(given["base"].state_dict(), strict=False)
    folders = given | {"base": save_model(given["base"], tmp_path / "base")}
    folders["experts"] = {t: save_model(e, tmp_path / t) for t, e in given["experts"].items()}
    merged(folders, out=tmp_path / "merged")
    assert same_bits(load_model(tmp_path / "merged"), ours)
    for out, base in (("one", folders["base"]), ("other", save_model(masked, tmp_path / "masked"))):
        calibrate(tmp_path / "merged", **folders | {"base": base}, out=tmp_path / out)
        assert same_bits(load_model(tmp_path / out), expected)
    (near, *_) = compare({"out": tmp_path / "one"}, folders["experts"], given["batches"])
    assert near.kl is None and 0 < near.relative_drift < 1


def test_experts_without_the_head_of_the_merged_model_are_compared_by_features(given, tmp_path):
    masked = make(lambda: tf.BertForMaskedLM(BERT), 3, torch.float32)
    tower = make(lambda: tf.BertModel(BERT), 0, torch.float32)
    tower.load_state_dict(masked.bert.state_dict(), strict=False)
    experts = {t: save_model(e, tmp_path / t) for t, e in given["experts"].items()}
    batches, found = given["batches"], []
    for number, merged in enumerate((masked, tower)):
        folder, how = save_model(merged, tmp_path / str(number)), {"device": None, "dtype": None}
        models = open_models(folder, folder, experts, None, "auto", whole=False, **how)
        found.append(divergences(models, {"merged": models.merged}, batches, batches))
        found.append([one.relations for one in compare({"m": folder}, experts, batches)])
    assert found[:2] == found[2:]


def test_merged_classifier_keeps_the_head_of_the_base(given):
    given["base"] = base = classifier(3, 0)
    ours = merged(given)
    assert torch.equal(ours.classifier.weight, base.classifier.weight)
    mean = averaged([expert.bert for expert in given["experts"].values()])
    assert same_bits(ours.bert.encoder, mean.encoder)
    result = calibrate(ours, **given).model
    assert torch.equal(result.classifier.weight, base.classifier.weight)
    assert not same_bits(result, ours)


def test_classifiers_on_a_siglips_tower_are_merged_below_their_heads_and_calibrated(tmp_path):
    kind, experts, said = tf.SiglipForImageClassification, {}, []
    for task, labels in (("a", "xy"), ("b", "uvw")):
        config = tf.SiglipConfig(vision_config=WIDE, id2label=dict(enumerate(labels)))
        experts[task] = make(lambda c=config: kind(c), len(labels), torch.float32)
    a, b = towers = [expert.vision_model for expert in experts.values()]
    merged = merge("average", b, experts)
    assert same_bits(merged, averaged(towers))
    headed = merge("average", experts["b"], {"a": experts["a"]}, progress=said.append)
    assert same_bits(headed.vision_model, a)
    assert same_bits(headed.classifier, experts["b"].classifier)
    assert said == ["a: its own head is not merged (classifier.bias, classifier.weight)"]
    batches = {task: images(seed, dtype=torch.float32) for seed, task in enumerate("ab")}
    given = {"merged": merged, "base": b, "batches": batches, "settings": PAPER}
    expected = calibrate(**given, experts=dict(zip("ab", towers, strict=True))).model
    folders = {task: save_model(expert, tmp_path / task) for task, expert in experts.items()}
    for own in (experts, folders):
        assert same_bits(calibrate(**given, experts=own).model, expected)
    wrong = f"SiglipModel in base, but .*\n.*all as {kind.__name__},"
    with pytest.raises(FeatCalError, match=wrong):
        merge("average", tf.SiglipModel(tf.SiglipConfig(vision_config=WIDE)), experts)
    layers = ((nn.Linear(2, 2), nn.Linear(2, width)) for width in (2, 3))
    pair = [nn.ModuleDict({"vision_model": a, "text": nn.Sequential(b)}) for a, b in layers]
    with pytest.raises(FeatCalError, match=r"text\.0"):  # a BLIP's text decoder is no head
        merge("average", pair[0], {"a": pair[1]})


def test_expert_with_a_larger_vocabulary_is_calibrated(given):
    experts = {task: expert.bert for task, expert in given["experts"].items()}
    ours, given["experts"] = averaged(list(experts.values())), experts
    expected = calibrate(ours, **given).model
    experts["a"].resize_token_embeddings(TEXT["vocab_size"] + 5)
    assert same_bits(calibrate(ours, **given).model, expected)


def test_a_peft_model_in_memory_and_its_folder_are_the_expert_they_compute(given, tmp_path):
    peft = pytest.importorskip("peft")
    base = given["base"]
    how = {"r": 2, "target_modules": ["query", "value"], "init_lora_weights": False, "bias": "all"}
    pairs = ((copy.deepcopy(base), peft.LoraConfig(**how)) for _ in range(2))
    adapted, plain = (peft.get_peft_model(*pair) for pair in pairs)
    peft.set_peft_model_state_dict(plain, peft.get_peft_model_state_dict(adapted))
    adapted.save_pretrained(tmp_path / "adapter")
    whole, forms = plain.merge_and_unload(), (adapted, tmp_path / "adapter")
    # merge adds the adapter in float64
    assert difference(merge("average", base, {"a": adapted}), whole) < 1e-6
    given["batches"] = batches = {"a": given["batches"]["a"]}
    calls = [{**given, "experts": {"a": expert}} for expert in (whole, *forms)]
    calls[-1]["base"] = torch.nn.DataParallel(base)
    expected, *results = (calibrate(base, **call).model for call in calls)
    assert all(same_bits(model, expected) for model in results)
    with pytest.raises(FeatCalError, match="not a model[^|]*the command compare"):
        compare({"base": base}, {"a": tmp_path / "adapter"}, batches)


def test_one_adapted_expert_at_a_time_has_a_dense_copy(given, monkeypatch):
    peft, copies, alive = pytest.importorskip("peft"), weakref.WeakSet(), []

    def watched(model):
        copies.add(dense := without_adapters(model))
        alive.append(len(copies))
        return dense

    monkeypatch.setattr("featcal.calibration.features.without_adapters", watched)
    config, base = peft.LoraConfig(target_modules=["query"]), given["base"]
    experts = {task: peft.get_peft_model(copy.deepcopy(base), config) for task in "abc"}
    compare({"base": base}, experts, dict.fromkeys("abc", text(1)))
    assert alive == [1, 2, 3, 3]  # the model, this expert and, until it is replaced, the last
