"""Agreement with experts against what whole models compute, of models with and without a head, in
memory and in folders.
"""

import json

import language
import numpy as np
import pytest
import torch
import transformers as tf
from families import FAMILIES, experiment
from language import WORDS, jsonl
from tiny import TEXT, make, shifted

import featcal
from featcal.cli import main as cli


def scores(model, batch):
    """log softmax of every row that counts, sample by sample."""
    with torch.no_grad():
        z = model(**batch).logits.log_softmax(-1)
    if z.dim() == 2:
        return [row[None] for row in z]
    mask = batch["labels"] != -100 if "labels" in batch else batch["attention_mask"].bool()
    return [row[m] for row, m in zip(z, mask, strict=True)]


@pytest.mark.parametrize("family", ["llama", "t5", "classifier"])
def test_kl_and_top_1_are_those_of_the_models_own_scores(family):
    given = experiment(FAMILIES["bert" if family == "classifier" else family])
    if family == "classifier":
        base = make(lambda: tf.BertForSequenceClassification(tf.BertConfig(**TEXT, num_labels=4)))
        given |= {
            "merged": base,
            "experts": {task: shifted(base, i + 3) for i, task in enumerate(given["experts"])},
        }
    models = {"merged": given["merged"], "moved": shifted(given["merged"], 7)}
    found = featcal.compare(models, given["experts"], given["batches"])
    assert [(one.expert, one.model) for one in found] == [
        (t, m) for t in sorted(given["experts"]) for m in models
    ]
    for one in found:
        pairs = []
        for batch in given["batches"][one.expert]:
            pairs += zip(
                scores(models[one.model], batch),
                scores(given["experts"][one.expert], batch),
                strict=True,
            )
        kl = [(q.exp() * (q - p)).sum(-1) for p, q in pairs]
        assert one.kl == pytest.approx(float(torch.cat(kl).mean()), rel=1e-6)
        assert one.top1 == pytest.approx(
            float(torch.cat([p.argmax(-1) == q.argmax(-1) for p, q in pairs]).double().mean())
        )
        assert one.samples == len(pairs)


def test_a_model_agrees_with_itself_and_the_paired_error_is_that_of_the_differences():
    given = experiment(FAMILIES["vit"])
    expert = given["experts"]["a"]
    batches = {"a": given["batches"]["a"]}
    same, near, far = featcal.compare(
        {"itself": expert, "near": shifted(expert, 1, 0.01), "far": shifted(expert, 1, 0.1)},
        {"a": expert},
        batches,
    )
    assert (
        same.relative_drift == 0
        and same.cosine == pytest.approx(1)
        and same.kl is None
        and not same.than_first
    )
    assert 0 < near.relative_drift < far.relative_drift and near.cosine > far.cosine
    singles = [
        featcal.compare(
            {"m": shifted(expert, 1, 0.1)}, {"a": expert}, {"a": [{"pixel_values": x[None]}]}
        )[0].relative_drift
        for batch in batches["a"]
        for x in batch["pixel_values"]
    ]
    difference = far.than_first["relative_drift"]
    assert difference.mean == pytest.approx(np.mean(singles), rel=1e-6)
    assert difference.error == pytest.approx(
        np.std(singles, ddof=1) / np.sqrt(len(singles)), rel=1e-6
    )


def test_the_command_tells_what_the_call_in_python_does(tmp_path, monkeypatch, capsys):
    for seed, name in enumerate(("merged", "new", "a")):
        language.folder(tmp_path / name, "llama", seed)
    jsonl(tmp_path / "a.jsonl", [{"text": word} for word in WORDS])
    monkeypatch.chdir(tmp_path)
    asked = [
        "compare",
        "--model",
        "merged=merged",
        "--model",
        "new=new",
        "--expert",
        "a=a",
        "--data",
        "a=a.jsonl",
    ]
    assert cli.main([*asked, "--samples", "4", "--skip", "5", "--json", "--device", "cpu"]) == 0
    told = json.loads(capsys.readouterr().out)["agreement"]
    batches = {"a": featcal.data.batches.drawn(*_given(tmp_path))["a"]}
    called = featcal.compare({"merged": "merged", "new": "new"}, {"a": "a"}, batches)
    assert [one["kl"] for one in told] == [one.kl for one in called] and told[1]["than_first"][
        "kl"
    ]["error"] > 0
    assert cli.main([*asked, "--samples", "4", "--skip", "5", "--device", "cpu"]) == 0
    assert f"{called[1].relative_drift:.3f}" in capsys.readouterr().out


def _given(folder):
    from featcal.data.batches import Draw
    from featcal.data.places import Place
    from featcal.models.load import skeleton

    return (
        skeleton(folder / "merged")[0],
        [folder / "merged"],
        {"a": Place(folder / "a.jsonl")},
        Draw(4, 42, 32, behind=5),
    )
