"""Accuracy on labelled texts, for every kind of model, against transformers' scores."""

import json

import language
import pytest
import torch
import transformers as tf
from families import T5
from language import POSITIONS, VOCABULARY, jsonl, tokenizer
from tiny import TEXT, make

from featcal.cli import main as cli
from featcal.models.load import load_model, save_model

NAMES = ("bad", "good", "neither of them")
SAMPLES = [("the cat sat", "good"), ("a dog", "bad"), ("ships sail far away", "good")]
SAMPLES += [("red", "neither of them"), ("no", "bad")]
TARGETS = [{"input": text, "target": name} for text, name in SAMPLES]
COMPLETIONS = [{"prompt": text, "completion": f" {name}"} for text, name in SAMPLES]
LABELS = [{"text": text, "label": name} for text, name in SAMPLES]
CLASSES = ("--classes", f"t={', '.join(NAMES)}")


def evaluate(folder, rows, *more):
    data = jsonl(folder / "rows.jsonl", rows)
    return cli.main(["evaluate", "--model", str(folder / "m"), "--data", f"t={data}", *more])


def accuracy(folder, rows, capsys, *more):
    assert evaluate(folder, rows, "--set", "batch=2", "--json", *more) == 0
    result = json.loads(capsys.readouterr().out)["tasks"]["t"]
    assert result["texts"] == len(rows)
    return result["accuracy"]


def expected(predict):
    scores = [(predict(text), name) for text, name in SAMPLES]
    right = sum(max(own, key=own.get) == name for own, name in scores)
    return pytest.approx(100 * right / len(SAMPLES))


@pytest.mark.parametrize("rows", [TARGETS, LABELS, COMPLETIONS], ids=lambda rows: [*rows[0]][1])
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_language_models_answer_with_the_likeliest_label(kind, rows, tmp_path, capsys):
    model, tokenize = load_model(language.folder(tmp_path / "m", kind, 3)), tokenizer()
    space = "" if "target" in rows[0] else " "

    def log_likelihoods(text):
        scores = {}
        for label in NAMES:
            before = text if kind == "llama" else ""
            ids = torch.tensor([tokenize(before + space + label).input_ids])
            labels = ids.clone()
            if kind == "llama":
                labels[:, : len(text)] = -100  # a token is a byte
            inputs = {"input_ids": ids} if kind == "llama" else tokenize(text, return_tensors="pt")
            with torch.no_grad():
                loss = model(**inputs, labels=labels).loss
            scores[label] = -float(loss) * int((labels != -100).sum())
        return scores

    for classes in ((), CLASSES):
        assert accuracy(tmp_path, rows, capsys, *classes) == expected(log_likelihoods)
    chats = [{"messages": [{"role": "user", "content": t}], "label": n} for t, n in SAMPLES]
    assert evaluate(tmp_path, chats) == 2 and "line 1: is a chat" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "pad"), [("Bert", 0), ("Llama", 7), ("Llama", None), ("T5", 0)])
def test_classifiers_answer_with_their_own_names(kind, pad, tmp_path, capsys):
    names = {0: "neither of them", 1: "GOOD", 2: "bad "}
    sizes = TEXT | POSITIONS | T5 | {"vocab_size": VOCABULARY, "pad_token_id": pad}
    kind = getattr(tf, f"{kind}ForSequenceClassification")
    config = kind.config_class(**sizes, id2label=names)  # and label2id still says LABEL_0
    save_model(make(lambda: kind(config), 5, torch.float32), tmp_path / "m")
    tokenizer().save_pretrained(tmp_path / "m")
    model = load_model(tmp_path / "m")

    def logits(text):
        with torch.no_grad():
            row = model(**tokenizer()(text, return_tensors="pt")).logits[0]
        return {names[i].strip().lower(): float(z) for i, z in enumerate(row)}

    for rows in (LABELS, TARGETS, COMPLETIONS):  # a target is the label, and not read
        assert accuracy(tmp_path, rows, capsys) == expected(logits)
    numbered = [{"text": text, "label": NAMES.index(name)} for text, name in SAMPLES]
    assert accuracy(tmp_path, numbered, capsys, *CLASSES) == expected(logits)
    assert evaluate(tmp_path, [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]) == 2
    assert "id2label" in capsys.readouterr().err


def test_encoders_answer_with_the_nearest_label_by_the_mean_over_tokens(tmp_path, capsys):
    model, tokenize = load_model(language.folder(tmp_path / "m", "bert", 3)), tokenizer()

    def vector(text):
        with torch.no_grad():
            hidden = model(**tokenize(text, return_tensors="pt")).last_hidden_state[0]
        return torch.nn.functional.normalize(hidden.mean(0), dim=0)

    heads = {name: vector(f"it is {name}") for name in NAMES}
    measured = accuracy(tmp_path, LABELS, capsys, "--template", "it is {}")
    assert evaluate(tmp_path, LABELS) == 0 and "split: bad, good" in capsys.readouterr().err
    assert measured == expected(lambda text: {n: float(vector(text) @ h) for n, h in heads.items()})
