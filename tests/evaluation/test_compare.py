"""Agreement with experts against the scores of whole models, in memory and in folders."""

import language
import numpy as np
import pytest
import torch
import transformers as tf
from families import FAMILIES, GROUPED, WIDE, Family, experiment, family, translations
from language import jsonl
from test_cli import told
from test_save import sentence_folder
from tiny import TEXT, images, make, shifted

import featcal
from featcal.calibration.choose import relational_divergence
from featcal.models.load import save_model


def scores(model, batch):
    with torch.no_grad():
        z = model(**batch).logits
        z = (torch.cat([z, 0 * z], 1) if z.shape[-1] == 1 else z).log_softmax(-1)
    if z.dim() == 2:
        return [row[None] for row in z]
    mask = batch["labels"] != -100 if "labels" in batch else batch["attention_mask"].bool()
    return [row[m] for row, m in zip(z, mask, strict=True)]


CLASSIFIERS = [("Sequence", 4), ("Sequence", 1), ("Token", 4)]  # one score is the logit of yes


def bart():
    own = tf.BartConfig(d_model=32, encoder_layers=1, decoder_layers=1, vocab_size=97)
    model = tf.BartForConditionalGeneration(own)
    model.final_logits_bias.normal_()
    return model


AFTER_HEAD = {  # the logits are scaled, capped or shifted
    "granite": family("GraniteForCausalLM", GROUPED | {"logits_scaling": 8.0}, "model.layers"),
    "cohere": family("CohereForCausalLM", GROUPED | {"eos_token_id": 1}, "model.layers"),
    "bart": Family(bart, translations, {}),
}


@pytest.mark.parametrize("family", ["llama", "t5", "gemma2", *CLASSIFIERS, *AFTER_HEAD])
def test_kl_and_top1_equal_those_of_whole_models(family):
    given = experiment((FAMILIES | AFTER_HEAD)[family if isinstance(family, str) else "bert"])
    if isinstance(family, tuple):
        kind = getattr(tf, f"BertFor{family[0]}Classification")
        base = make(lambda: kind(tf.BertConfig(**TEXT, num_labels=family[1])))
        experts = {task: shifted(base, i + 3) for i, task in enumerate(given["experts"])}
        given |= {"merged": base, "experts": experts}
    experts = given["experts"]
    models = {"merged": given["merged"], "moved": shifted(given["merged"], 7)}
    agreements = featcal.compare(models, experts, given["batches"])
    names = [(one.expert, one.model) for one in agreements]
    assert names == [(task, model) for task in sorted(experts) for model in models]
    for one in agreements:
        own, pair = given["batches"][one.expert], (models[one.model], experts[one.expert])
        ours, theirs = ([row for batch in own for row in scores(m, batch)] for m in pair)
        samples = [*zip(ours, theirs, strict=True)]  # a text has the mean over its tokens
        kl = [float((q.exp() * (q - p)).sum(-1).mean()) for p, q in samples]
        top1 = [float((p.argmax(-1) == q.argmax(-1)).double().mean()) for p, q in samples]
        assert (one.kl, one.top1) == pytest.approx((np.mean(kl), np.mean(top1)), rel=1e-6)
        assert one.samples == len(ours)


def test_heads_differ_where_only_one_class_has_a_plan_of_its_own():
    given = experiment(FAMILIES["llama"])
    experts = {}
    for task, causal in given["experts"].items():
        config = tf.LlamaConfig(**causal.config.to_dict() | {"pad_token_id": 0})
        experts[task] = tf.LlamaForSequenceClassification(config).to(causal.dtype)
        experts[task].model.load_state_dict(causal.model.state_dict())
    own = featcal.compare({"m": given["merged"]}, given["experts"], given["batches"])
    other = featcal.compare({"m": given["merged"]}, experts, given["batches"])
    assert [one.relative_drift for one in own] == [one.relative_drift for one in other]
    assert all(one.kl is None and one.relations for one in other)


def test_a_tower_is_compared_with_the_tower_of_a_whole_siglip(tmp_path):
    config = tf.SiglipConfig(vision_config=WIDE, text_config=TEXT)
    whole = make(lambda: tf.SiglipModel(config), dtype=torch.float32)
    for form in (whole, save_model(whole, tmp_path)):
        models = {"m": whole.vision_model}, {"a": form}
        [one] = featcal.compare(*models, {"a": images(1, dtype=torch.float32)})
        assert one.relative_drift == 0 and one.samples == 6


def test_texts_without_a_mask_have_the_mean_over_all_tokens():
    given = experiment(FAMILIES["bert"])
    bare = [{"input_ids": batch["input_ids"]} for batch in given["batches"]["a"]]
    full = [batch | {"attention_mask": torch.ones_like(batch["input_ids"])} for batch in bare]
    models = {"m": given["merged"]}, {"a": given["experts"]["a"]}
    assert featcal.compare(*models, {"a": bare}) == featcal.compare(*models, {"a": full})


def test_paired_errors_are_those_of_the_differences_between_samples():
    given = experiment(FAMILIES["vit"])
    expert, batches = given["experts"]["a"], given["batches"]["a"]
    near, far = shifted(expert, 1, 0.01), shifted(expert, 1, 0.1)
    models = {"itself": expert, "near": near, "far": far}
    same, closer, farther = agreements = featcal.compare(models, {"a": expert}, {"a": batches})
    expert.config.return_dict = near.config.return_dict = far.config.return_dict = False
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert featcal.compare(models, {"a": expert}, {"a": batches}) == agreements
    assert same.relative_drift == 0 and same.cosine == pytest.approx(1)
    assert same.kl is None and not same.than_first
    assert 0 < closer.relative_drift < farther.relative_drift and closer.cosine > farther.cosine
    alone = ({"a": [{"pixel_values": x[None]}]} for batch in batches for x in batch["pixel_values"])
    drifts = [featcal.compare({"m": far}, {"a": expert}, x)[0].relative_drift for x in alone]
    difference = farther.than_first["relative_drift"]
    assert difference.mean == pytest.approx(np.mean(drifts), rel=1e-6)
    error = np.std(drifts, ddof=1) / np.sqrt(len(drifts))
    assert difference.error == pytest.approx(error, rel=1e-6)


def test_relations_are_between_the_vectors_that_sentence_transformers_makes(tmp_path, capsys):
    library = pytest.importorskip("sentence_transformers")
    texts, vectors = ["the cat sat far away", "a dog", "red the end of it", "no", "ships"], []
    for seed, name in enumerate("ab"):
        language.folder(tmp_path / name, "bert", seed)
        sentence_folder(tmp_path / name, {"pooling_mode": "max"})
        (tmp_path / name / "config_sentence_transformers.json").write_text('{"truncate_dim": 6}')
        encoder = library.SentenceTransformer(str(tmp_path / name), device="cpu")
        vectors.append(encoder.encode(texts, convert_to_tensor=True))
    batch = dict(language.tokenizer()(texts, padding=True, return_tensors="pt"))
    folders = {"a": tmp_path / "a"}, {"b": tmp_path / "b"}
    [one] = featcal.compare(*folders, {"b": [batch]})
    assert one.relations == pytest.approx(float(relational_divergence(*vectors).mean()), rel=1e-3)
    (tmp_path / "a/modules.json").unlink()  # a plain folder has its vectors made as the expert's
    assert featcal.compare(*folders, {"b": [batch]}) == [one]
    classes = encoder.encode(["red", "the cat"], normalize_embeddings=True)
    few = {"b": [{name: x[:2] for name, x in batch.items()}]}
    assert featcal.compare(*folders, few, labels={"b": torch.as_tensor(classes)})[0].relations > 0
    expected = float(relational_divergence(*vectors, classes).mean())
    rows = jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    asked = ["--model", f"a={tmp_path / 'a'}", "--expert", f"b={tmp_path / 'b'}", "--data"]
    asked += [f"b={rows}", "--classes", "b=red,the cat"]
    near = told(capsys, "compare", *asked)["agreement"][0]["relations"]
    assert near == pytest.approx(expected, rel=1e-3)
